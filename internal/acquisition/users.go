package acquisition

// A User is a reference to a lock that shares an acquisition. Several may refer to the same lock. The first is a strong one:
// it keeps the lock from the garbage collector until [User.Watch] has been called.
type User interface {
	// Self is the same for all references to one lock.
	Self() any
	// End tells that the acquisition was lost, and why.
	End(cause error)
	// Watch returns a weak reference to the lock, and whether the garbage collector has taken it. It is called under the
	// mutex of the acquisition, and must take none.
	Watch() (weak User, taken bool)
	// Forget ends a lock that the garbage collector has taken. It may be called again.
	Forget()
}

// users are the locks that share an acquisition: one, and seldom more.
type users struct {
	one  User         // it asked for what the acquisition was made for, reading or writing
	more map[any]user // by Self
}

// A user is one of more.
type user struct {
	User
	write   bool
	overdue bool
}

// add adds a user. The acquisition was made for writing or for reading.
func (us *users) add(u User, write, acquisition bool) {
	if us.one == nil && write == acquisition {
		us.one = u
		return
	}
	if us.more == nil {
		us.more = map[any]user{}
	}
	us.more[u.Self()] = user{User: u, write: write}
}

func (us *users) remove(u User) {
	if us.isOne(u) {
		us.one = nil
	}
	delete(us.more, u.Self())
}

func (us *users) isOne(u User) bool { return us.one != nil && us.one.Self() == u.Self() }

func (us *users) has(u User) bool {
	_, more := us.more[u.Self()]
	return more || us.isOne(u)
}

func (us *users) none() bool { return us.one == nil && len(us.more) == 0 }

// writing reports whether u is one of them and writes.
func (us *users) writing(u User, acquisition bool) bool {
	return us.more[u.Self()].write || us.isOne(u) && acquisition
}

// writers is how many of them write.
func (us *users) writers(acquisition bool) (n int) {
	if us.one != nil && acquisition {
		n++
	}
	for _, u := range us.more {
		if u.write {
			n++
		}
	}
	return n
}

// makeOverdue notes that u, one of them, has held the acquisition for as long as it may.
func (us *users) makeOverdue(u User, acquisition bool) {
	overdue := user{us.more[u.Self()].User, us.writing(u, acquisition), true}
	if us.isOne(u) {
		overdue.User = us.one
	}
	us.remove(u)
	if us.more == nil {
		us.more = map[any]user{}
	}
	us.more[u.Self()] = overdue
}

func (us *users) isOverdue(u User) bool { return us.more[u.Self()].overdue }

// allOverdue reports whether there are users, and all of them are overdue.
func (us *users) allOverdue() bool {
	if us.one != nil {
		return false
	}
	for _, u := range us.more {
		if !u.overdue {
			return false
		}
	}
	return len(us.more) > 0
}

// forgetTaken ends those that the garbage collector has taken. It is called with each renewal. From the first one on the
// references are weak: a lock that is unlocked earlier, as most are, costs nothing for that.
func (us *users) forgetTaken() {
	watch := func(u User) User {
		weak, taken := u.Watch()
		if taken {
			go weak.Forget()
		}
		return weak
	}
	if us.one != nil {
		us.one = watch(us.one)
	}
	for self, u := range us.more {
		u.User = watch(u.User)
		us.more[self] = u
	}
}

// end tells them that the acquisition was lost. It needs no mutex: from then on nobody joins or leaves. Each is told even
// if the context of another one panics.
func (us *users) end(cause error) {
	for _, u := range us.more {
		defer u.End(cause)
	}
	if us.one != nil {
		us.one.End(cause)
	}
}
