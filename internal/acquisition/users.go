package acquisition

// A User is a lock that shares an acquisition.
type User interface {
	// End tells that the acquisition was lost, and why.
	End(cause error)
}

// users are the locks that share an acquisition: one, and seldom more.
type users struct {
	one  User          // it asked for what the acquisition was made for, reading or writing
	more map[User]bool // whether it writes
}

// add adds a user. The acquisition was made for writing or for reading.
func (us *users) add(u User, write, acquisition bool) {
	if us.one == nil && write == acquisition {
		us.one = u
		return
	}
	if us.more == nil {
		us.more = map[User]bool{}
	}
	us.more[u] = write
}

func (us *users) remove(u User) {
	if us.one == u {
		us.one = nil
	}
	delete(us.more, u)
}

func (us *users) has(u User) bool {
	_, more := us.more[u]
	return more || us.one == u
}

func (us *users) none() bool { return us.one == nil && len(us.more) == 0 }

// writing reports whether u is one of them and writes.
func (us *users) writing(u User, acquisition bool) bool {
	return us.more[u] || us.one == u && acquisition
}

// writers is how many of them write.
func (us *users) writers(acquisition bool) (n int) {
	if us.one != nil && acquisition {
		n++
	}
	for _, write := range us.more {
		if write {
			n++
		}
	}
	return n
}

// end tells them that the acquisition was lost. It needs no mutex: from then on nobody joins or leaves. Each is told even
// if the context of another one panics.
func (us *users) end(cause error) {
	for u := range us.more {
		defer u.End(cause)
	}
	if us.one != nil {
		us.one.End(cause)
	}
}
