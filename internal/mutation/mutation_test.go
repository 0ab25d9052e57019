// Package mutation checks that the tests find bugs. It breaks the library in one
// place at a time, in ways in which other locks were broken, and each mutant must be
// caught: by the model (TestScripts… of internal/script), by the simulation
// (internal/sim), or, if random tests seldom reach it, by a test of its own.
//
// The library contains no code for this: go's -overlay replaces a file by its mutant.
package mutation

import (
	"context"
	"encoding/json"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

var run = flag.Bool("mutants", false, "run the tests against every mutant (some minutes)")

// A mutant is the library with one thing broken.
type mutant struct {
	what     string
	file     string // relative to the root of the module
	old, new string // text that occurs once in file, and its replacement
	by       checker
}

// A checker is a test that must fail with the mutant.
type checker struct {
	pkg, test string
	flags     []string
}

var (
	model = checker{"./internal/script", "^TestScripts(OfAQuorum)?DoWhatTheModelSays$", []string{"-rapid.nofailfile", "-rapid.shrinktime=1s"}}
	sim   = checker{"./internal/sim", "^TestSimulation$", []string{"-sim.hours=6"}}
)

// foreign runs each verb in each state with foreign data under the keys, on a real Redis.
var foreign = ofScripts("TestForeignDataIsLeftAloneByEveryVerb$/^redis")

// ofScripts is a scenario of internal/script.
func ofScripts(test string) checker {
	return checker{"./internal/script", "^" + test + "$", []string{"-timeout=20s"}}
}

func scenario(test string) checker { return checker{".", "^" + test + "$", []string{"-timeout=20s"}} }

// onServers is a test of internal/integration.
func onServers(test string) checker {
	return checker{"./internal/integration", "^" + test + "$", []string{"-timeout=20s"}}
}

var mutants = []mutant{
	// Trust.
	{"trust counts from the reply", "internal/acquisition/part.go", "		p = p.onAcquired(sent, sweeps, r, err)\n", "		p = p.onAcquired(max(sent, clock.Now()), sweeps, r, err)\n", sim},
	{"no timer ends the trust", "internal/node/renewer.go", "func() { l.owner.OnExpired(ErrExpired) }", "func() {}", sim},
	{"a grant message is taken for a new lease", "internal/acquisition/part.go", "		p.grant(clock.Now(), token)\n		if p.in {",
		"		p.grant(clock.Now(), token)\n		p.Acknowledge(clock.Now())\n		if p.in {", sim},

	// Leases.
	{"no lease is ever purged", "lua/lib/hand_on.lua", "	if #ended == 0 then\n		return\n	end\n", "	if true then\n		return\n	end\n", model},
	{"a short lease shortens the keys of all", "lua/lib/acquire.lua",
		"		call('ZADD', LEASES, format('%d', now + TTL), ID)\n		expire(held == 'set', true)\n",
		"		call('ZADD', LEASES, format('%d', now + TTL), ID)\n		expire(held == 'set', true, format('%d', now + TTL))\n", model},
	{"a writer that was granted keeps its waiter's lease", "lua/lib/hand_on.lua", "	call('ZREM', LEASES, id)\n	if lives(ends)", "	if lives(ends)", model},
	{"the queue does not live as long as its leases", "lua/lib/expiry.lua", "			call('PEXPIREAT', INTENTS, longest)\n", "", model},

	// Once.
	{"unlock frees another holder", "lua/unlock.lua", "local writer = KIND == 'w' and redis.pcall('GET', HOLDER) == ID", "local writer = KIND == 'w'", model},
	{"an id acquires again after its release", "lua/lib/acquire.lua", "if call('ZSCORE', LEASES, '-' .. ID) then", "if false then", model},
	{"a renewal acquires for an unknown id", "lua/refresh.lua", "elseif lives(call('ZSCORE', LEASES, ID)) then", "else", model},

	// Order, and no idle lock.
	{"an acquire overtakes the waiters", "lua/lib/acquire.lua", "return more == 0 and not behind and (", "return more == 0 and (", model},
	{"an age is ignored", "lua/lib/place.lua", "if age and highest", "if nil and highest", model},
	{"an age leaves its class", "lua/lib/place.lua", "math.max(us - age, 1)", "us - age", model},
	{"an age counts on a clock that was set back", "lua/lib/place.lua", " and highest < class + us + AHEAD then", " then", ofScripts("TestAgeDoesNotCountOnAClockThatWasSetBack")},
	{"an age overtakes older requests", "lua/lib/acquire.lua", "		behind = precedes(place)\n", "		behind = false\n", model},
	{"a resent acquire takes another place", "lua/lib/acquire.lua", "call('ZSCORE', INTENTS, KIND .. ID) or place", "place", ofScripts("TestResentAcquireKeepsItsPlace")},
	{"a reader joins behind those that rank after it", "lua/fast/join.lua", "held == 'string' or at > last and call", "held == 'string' or call", model},
	{"a waiter in the middle watches the last one", "lua/fast/join.lua", "at > last and math.max(leases[1] - now, 0) or in_front(call('ZRANK', INTENTS, KIND .. ID))", "math.max(leases[1] - now, 0)", model},
	{"the age is not sent", "internal/script/command.go", "if p.Score == nil && age >= time.Microsecond {", "if false {", model},
	{"a node that grants an acquire late does not have the others renewed", "internal/acquisition/several.go", "	if again {\n", "	if again && false {\n", scenario("TestNodesThatFailSoonOneAfterTheOtherLoseNothing")},
	{"a node that is acquired again does not have the others renewed", "internal/acquisition/several.go", "	case p.granted:\n		s.renewAll()\n", "	case p.granted:\n", scenario("TestNodesThatFailSoonOneAfterTheOtherLoseNothing")},
	{"a request over several nodes has a new rank", "internal/acquisition/several.go", "	if origin.Rank == 0 {\n", "	if true {\n", checker{"./internal/acquisition", "^TestRankOverSeveralNodesIsThatOfTheRequest$", nil}},

	{"a renewal hands nothing on when a lease has ended", "lua/refresh.lua", "drop()\nhand_on()\n", "drop()\n", model},
	{"a release hands nothing on", "lua/unlock.lua", "hand_on()\nif blocked then", "if blocked then", model},
	{"a downgrade lets the next writer in between", "lua/refresh.lua", "	call('DEL', HOLDER)\n	call('SADD'", "	call('DEL', HOLDER)\n	held = 'none'\n	hand_on()\n	call('SADD'", model},
	{"a release leaves no tombstone for an acquire that may still be under way", "internal/acquisition/part.go", "p.Tombstone = err != nil && !lockerr.Has(err, lockerr.Full) || p.Node.MaySendTwice(sent)", "p.Tombstone = false", scenario("TestLateCopyOfAnAcquireIsRefused")},
	{"a caller that gives up does not release", "internal/acquisition/acquisition.go", "	if ctx.Err() != nil {\n		a.releaseInBackground()\n", "	if ctx.Err() != nil {\n", sim},

	{"a try that has lost its grant waits", "internal/acquisition/one.go", "p.in && !n.try\n", "p.in\n", scenario("TestTryThatLosesItsGrantIsRefused")},

	{"calls are not limited", "internal/node/node.go", "newLimiter(n.connections)", "newLimiter(n.connections << 10)", scenario("TestSimultaneousAcquiresAllWait")},
	{"acquires take every connection", "internal/node/limiter.go", "		acquires-- //", "		//", checker{"./internal/node", "^TestReleasesDoNotWaitBehindAcquires$", nil}},

	// Tokens.
	{"a token is not written back", "lua/lib/token.lua", "	call('SET', TOKEN, format('%d', last_token), 'PX', RETENTION)\n", "", model},
	{"a token follows a counter that has fallen back", "lua/lib/token.lua", "proposal or us, FLOOR", "proposal or last_token == 0 and us or 0, FLOOR", ofScripts("TestTokensRiseAlthoughTheCounterFallsBack")},
	{"a counter of a quorum begins with the clock of its node", "lua/lib/token.lua", "proposal or us, FLOOR", "proposal or us, last_token == 0 and us or 0, FLOOR", scenario("TestTokensRiseOverAnEmptyRestartWhateverTheClocksOfTheNodes")},
	{"a renewal makes a counter of a quorum from the clock", "lua/lib/standing.lua", "next_token(proposal or score and score % SPAN)", "next_token(proposal)", ofScripts("TestRenewalMakesACounterFromTheRank")},
	{"the token of an old waiter may be its rank", "internal/acquisition/several.go", "p.Write && waited > s.Config.TTL/2", "waited < 0", scenario("TestTokenOfAnOldWaiterRisesOverAnEmptyRestart")},
	{"a raise that follows an acquire takes as long as the lease", "internal/node/lease.go", "		l.boundRaise()\n		sooner(now)\n", "		sooner(now)\n", scenario("TestNodeThatHangsInARaiseCostsTwoTimeouts")},
	{"an acquire follows a counter that has fallen back", "lua/fast/lock.lua", "math.max(last_token + 1, us, FLOOR)", "last_token > 0 and last_token + 1 or us", ofScripts("TestTokensRiseAlthoughTheCounterFallsBack")},
	{"a counter is recent for as long as a failover may take", "lua/lib/counter.lua", "local RECENT = 86399990", "local RECENT = 86390000", ofScripts("TestTokensRiseWhateverBecomesOfTheCounter")},
	{"a counter that was set by the clock is not recent", "lua/fast/lock.lua", "call('SET', TOKEN, format('%d', token), 'PX', RETENTION)", "call('SET', TOKEN, format('%d', token), last_token > 0 and 'KEEPTTL' or 'PX', last_token == 0 and RETENTION or nil)", model},
	{"a token is counted in foreign data", "lua/fast/lock.lua", "		call('INCRBY', TOKEN, '-1') -- foreign data is as it was\n", "", ofScripts("TestForeignDataLikeARecentCounterIsLeftAlone")},
	{"a node does not raise its token", "lua/refresh.lua", "return standing(tonumber(ARGV[5]))", "return standing()", model},

	// Messages.
	{"a message for another mailbox travels in the reply", "lua/lib/message.lua", "if mailbox == own then", "if own then", model},
	{"nodes with a lower token count for a higher one", "internal/acquisition/several.go", "other.Until() >= soon && other.token == p.token {", "other.Until() >= soon && other.token <= p.token {", scenario("TestTokensRiseAlthoughMajoritiesDiffer")},

	// Several nodes.
	{"half of the nodes are a quorum", "internal/acquisition/config.go", "return n/2 + 1", "return max(1, n/2)", sim},
	{"no waiter makes way for a lower rank", "internal/acquisition/part.go", "if r.Preceded && a.state == pending && !a.hasMajority() {", "if false {", scenario("TestSplitVotesAreResolvedByRank")},
	{"a node that has not answered is asked again at once", "internal/acquisition/several.go", "		wentDown = s.markSilent(p, asked)\n", "", scenario("TestSilentNodeIsNotAskedAgainAtOnce")},
	{"a majority with a gap counts", "internal/acquisition/part.go", "case a.state == held && counted && (a.expiring || !a.nodes().heldSince(from)):",
		"case a.state == held && counted && !a.hasMajority():", scenario("TestLockIsLostWhenAMajorityForgetsIt")},

	// Foreign data.
	{"unlock pops before it checks the queue", "lua/fast/unlock.lua",
		"	head = ttl_of_intents >= 0 and ttl_of_leases >= 0 and redis.pcall('ZRANGE', INTENTS, '0', '0', 'WITHSCORES')\n",
		"	head = redis.call('ZPOPMIN', INTENTS)\n", model},
	{"an unlock takes its intent out of foreign data", "lua/unlock.lua", "if sane_intents and not writer then", "if not writer then", foreign},
	{"an unlock takes its lease out of foreign data", "lua/unlock.lua", "if sane_leases and not writer then", "if not writer then", foreign},
	{"a tombstone is put into foreign data", "lua/unlock.lua", "if tombstone and sane_leases then", "if tombstone then", onServers("TestReleaseInTheBackgroundLeavesForeignDataAlone")},
	{"a holder key without a TTL is taken for a lock", "lua/lib/held.lua", " or call('PTTL', HOLDER) < 0) then", ") then", onServers("TestForeignHolderEndsEveryWait")},
	{"a reader joins without checking the leases", "lua/fast/rlock.lua", "not back[1] and call('PTTL', LEASES) or -2", "not back[1] and 0 or -2", foreign},
	{"a renewal does not check for foreign data", "lua/refresh.lua", "local bad_key = foreign_key(KIND)\n", "local bad_key = nil\n", foreign},
	{"any number is taken for a counter", "lua/lib/last_token.lua", "last_token >= FLOOR and last_token < SPAN and format('%d', last_token) == counter\n", "last_token >= FLOOR\n", foreign},
	{"a writer is granted without checking the token", "lua/lib/hand_on.lua", "	if not last_token then\n		blocked = true\n		return\n	end\n", "	last_token = last_token or 0\n", foreign},

	// A full Redis.
	{"a reader's renewal begins with a growing write", "lua/fast/refresh.lua", "			and call('ZREM', LEASES, '') == 0\n", "", ofScripts("TestFullRedisKeepsTheLocksItHas")},
	{"a downgrade begins with a growing write", "lua/refresh.lua", "call('ZREM', LEASES, '') --", "--", ofScripts("TestFullRedisKeepsTheLocksItHas")},
	{"an acquire hands on before it is refused on a full Redis", "lua/lib/acquire.lua", "	call('ZADD', LEASES, 'XX', '0', '') --", "	--", ofScripts("TestFullRedisKeepsTheLocksItHas")},
	{"an unlock does not tell of foreign data", "internal/acquisition/release.go", "if err == nil && r.Status == script.Foreign {", "if false {", onServers("TestUnlockAmongForeignDataReturnsErrNotLock")},
	{"the error does not tell that Redis is full", "internal/lockerr/lockerr.go", "	case strings.Contains(text, \"OOM command not allowed\"):", "	case false:", onServers("TestLocksOutliveAFullRedis")},

	// Nesting.
	{"a context is canceled under the mutex", "internal/acquisition/acquisition.go", "	// A renewal whose reply was lost may have renewed it on the server.\n", "	a.owner.OnLost(why)\n", scenario("TestForeignCodeMayCallTheLibrary/contexts")},
	{"Held looks at the innermost lock alone", "reentry.go", "for l, ok := FromContext(ctx); ok; l, ok = FromContext(l.ctx) {", "for l, ok := FromContext(ctx); ok; ok = false {", scenario("TestHeldKnowsTheLocksOfAContext")},
	{"Held trusts a lease that is over", "reentry.go", "		err := l.usable()\n		if err == nil {\n			return nil\n", "		err := context.Cause(l.ctx)\n		if err == nil {\n			return nil\n", scenario("TestHeldKnowsTheTimeBeforeTheTimers")},
	{"waiters of another Redis are counted", "internal/localqueue/registry.go", "n.key == key && n.kind.Value().IsOn(mailbox)", "n.key == key", checker{"./redismutextest", "^TestWaitersOfAnotherRedisAreNotCounted$", nil}},
	{"the method of a context is called under the mutex", "reentry.go", "	defer owners.Unlock()\n	name := ",
		"	defer owners.Unlock()\n	outer, overdue = r.outer()\n	name := ", scenario("TestForeignCodeMayCallTheLibrary/contexts")},
	{"the text of an error is read under the mutex", "internal/lockerr/lockerr.go", "c := caused{ErrRedis, readOnce(cause), 0}", "c := caused{ErrRedis, cause, 0}", scenario("TestErrorsOfTheClientMayCallTheLibrary")},
	{"the first unlock releases the acquisition", "internal/localqueue/lock.go", "	if g.locks > 0 {\n		return false, nil, nil\n	}\n", "", checker{"./internal/localqueue", "^TestLastOfNestedLocksReleases$", nil}},

	{"a refused try names a waiter where a writer holds", "lua/lib/acquire.lua", "		return call('GET', HOLDER)\n", "		return string.sub(call('ZRANGE', INTENTS, '0', '0')[1] or '', 2)\n", model},
	{"a try that is refused in its process names nobody", "internal/localqueue/queue.go", "		id = t.acq.CurrentID()\n", "", scenario("TestRefusedTryNamesWhoIsInTheWay")},

	{"the time to wait bounds the lock", "lock.go", "context.WithCancelCause(r.ctx)", "context.WithCancelCause(r.waitCtx)", scenario("TestWaitBoundsTheWaitAndNotTheLock")},

	{"a panic leaves the lock", "lock.go", "		if !returned {\n", "		if !returned && false {\n", scenario("TestDoUnlocksAfterAPanic")},

	// Inspecting.
	{"inspecting shows waiters whose lease has ended", "lua/inspect.lua", "	if ms > 0 and #waiters", "	if #waiters", model},
	{"inspecting counts waiters whose lease has ended", "lua/inspect.lua", "		waiting = waiting - 1\n", "", model},
	{"inspecting removes members whose lease has ended", "lua/inspect.lua", "local most = format", "if #ended > 0 then\n	call('ZREM', LEASES, unpack(ended))\nend\nlocal most = format", model},
	{"a node of several makes the conclusion", "inspect.go", "		if len(ps) < majority {\n", "		if len(ps) < 1 {\n", scenario("TestInspectOfSeveralNodesShowsWhatTheMajoritySays")},

	// Revoking.
	{"a revocation hands nothing on", "lua/revoke.lua", "drop()\nhand_on()\n", "drop()\n", model},
	{"a revocation tells nobody", "lua/revoke.lua", "		send(mailbox, 'revoked ' .. number)\n", "", model},
	{"a revoked id may acquire again", "lua/revoke.lua", "	call('ZADD', LEASES, format('%d', now + TOMBSTONE), '-' .. id)\n", "", model},
	{"another holder is revoked", "lua/revoke.lua", "if writer and belongs(writer) then", "if writer then", model},
	{"a revocation knows one id of several", "lua/revoke.lua", "string.match(score and ID or '', OF_ONE)", "string.match('', OF_ONE)", scenario("TestRevokeOnSeveralNodesFindsAllIDs")},
	{"a message does not end a lock", "internal/node/renewer.go", "		go l.owner.OnExpired(lockerr.ErrRevoked) // it calls foreign code\n", "", scenario("TestRevokedLockEndsAtOnceAndIsHandedOn")},
	{"a renewal does not tell that the id was revoked", "internal/node/renewer.go", "			why = lockerr.ErrRevoked\n", "", scenario("TestRevocationIsLearnedAtTheNextRenewal")},
	{"a revoked waiter ends all waits of its queue", "internal/localqueue/queue.go", "	case lockerr.KindOf(err) == lockerr.ErrRevoked:", "	case false:", scenario("TestRevokedWaiterIsTheHeadOfItsQueue")},

	// Operators, as clients see them.
	{"the next one waits until a revoked lock would have ended", "lua/revoke.lua", "drop()\nhand_on()\n", "drop()\n", sim},
	{"a revoked lock is renewed", "internal/node/renewer.go", "	case r.Status != script.Granted && r.Status != script.Waiting:", "	case r.Status != script.Granted && r.Status != script.Waiting && r.Status != script.Tombstoned:", sim},
	{"a lock that Redis has forgotten is taken for a revoked one", "internal/node/renewer.go", "		why := ErrGone\n", "		why := lockerr.ErrRevoked\n", sim},
	{"an overdue lock is not free a TTL later", "internal/acquisition/acquisition.go", "		p.Node.Renewer.LetExpire(&p.Lease)\n", "		_ = p\n", sim},

	// Turns.
	{"requests with another TTL share a queue", "internal/acquisition/config.go", `strings.Join(names, " "), c.TTL, c.Drift`, `strings.Join(names, " "), 0, 0`, scenario("TestEqualRequestsShareAQueue")},
	{"a newcomer overtakes", "internal/localqueue/queue.go", "	q.line(w).push(w)\n	mine := ",
		"	if t := q.turnFor(w, clock.Now()); t != nil && q.grant(t, w.lock, w.write) {\n		q.mu.Unlock()\n		return nil\n	}\n	q.line(w).push(w)\n	mine := ", scenario("TestNewcomerDoesNotOvertake")},
	{"a turn without end", "internal/localqueue/turn.go", "now < t.ends && ", "", scenario("TestLockIsPassedOnForATurn")},
	{"a turn goes on with little trust", "internal/localqueue/turn.go", " && t.acq.Until() >= now.Add(t.acq.Config.TTL/4)", "", scenario("TestTurnEndsWithLittleTrust")},
	{"a turn has more locks than tokens", "internal/localqueue/turn.go", "t.grants < MaxGrants && ", "", scenario("TestTokensRiseOverTurns")},
	{"the token's low bits are not advanced", "internal/localqueue/turn.go", "t.users, t.grants = -1, t.grants+1", "t.users = -1", scenario("TestTokensRiseOverTurns")},
	{"a writer is served beside readers", "internal/localqueue/turn.go", "w.write && (!t.write || t.users > 0)", "w.write && !t.write", scenario("TestLocalLocksExcludeEachOtherInOrder")},
	{"a reader is served beside a writer", "internal/localqueue/turn.go", "t.users < 0, ", "", scenario("TestLocalLocksExcludeEachOtherInOrder")},
	{"a try is refused for a lock without trust", "internal/localqueue/queue.go", " && t.acq.Until() > now && ", " && ", checker{"./internal/localqueue", "^TestTryIsNotRefusedForALockWithoutTrust$", nil}},
	{"a lock that has been unlocked is overdue", "internal/localqueue/lock.go", "	if l.ended() != nil {\n		return false\n	}\n	l.overdue = true", "	l.overdue = true", checker{"./internal/localqueue", "^TestUnlockedLockIsNotOverdue$", nil}},
	{"a try of the class that goes first waits for the others", "internal/localqueue/queue.go", "	if q.line(w) == &q.first {\n		waiting = !q.first.empty()\n	}\n", "", checker{"./internal/localqueue", "^TestTryOfTheFirstClassPassesWaiters$", nil}},
	{"a lease that ends earlier than it did keeps its place", "internal/node/renewer.go", "		rn.leases.fix(l) // its", "		// its", checker{"./internal/node", "^TestLeaseWhoseTokenIsRaisedGoesFirst$", nil}},
	{"what Redis has acknowledged of a head that gives up counts for nobody", "internal/localqueue/queue.go", "		if p.acq.Withdraw() {\n", "		if p.acq.Withdraw() && false {\n", scenario("TestQueueOutlivesErrorsWhenItsHeadHasGivenUp")},
	{"a lost acquisition still serves", "internal/acquisition/acquisition.go", "	if a.state != held {\n		return ErrRetry", "	if a.state == pending {\n		return ErrRetry", checker{"./internal/localqueue", "^TestLostAcquisitionServesNobody$", nil}},
	{"the age is forgotten", "internal/localqueue/line.go", "w.write, try, w.origin)", "w.write, try, acquisition.Origin{})", scenario("TestAgeRestoresThePlace")},
	{"the waiter of a head that gave up stays", "internal/localqueue/queue.go", "if p != nil && (w == nil || w.write != p.write) {", "if false {", scenario("TestWaiterInRedisOutlivesItsHead")},
	{"a process waits in Redis for what it holds", "internal/localqueue/queue.go", "			q.acknowledged = true\n			return nil\n", "			q.acknowledged = true\n			break\n", scenario("TestOneWaiterInRedisForAProcess")},
	{"the release goes in front of the acquire", "internal/acquisition/release.go", "	if front == nil || !front.begin() {\n", "	if front != nil {\n		defer func() { go front.acquire(context.Background()) }()\n	}\n	if true {\n", scenario("TestAgeRestoresThePlace")},
	{"a write acquisition with readers only is not downgraded", "internal/localqueue/queue.go", "				d := t.acq.BeginDowngrade()\n				go func() { _ = d.Tell(context.Background(), nil) }()", "", scenario("TestWriteAcquisitionWithReadersIsDowngraded")},
	{"nobody looks when a turn is over", "internal/localqueue/queue.go", "			t.checkLater(now)\n", "", scenario("TestWriteAcquisitionWithReadersIsDowngraded")},
	{"an unused acquisition is kept", "internal/localqueue/queue.go", "		case t.users == 0:\n			q.drop(t)\n			t.acq.Withdraw()\n", "", checker{"./internal/localqueue", "^TestGrantThatServesNobodyIsNotKept$", nil}},
	{"a try is refused for a reader that is being acquired", "internal/localqueue/queue.go", "(w.write || q.line(w) == &q.rest && (q.first.writes() || q.rest.writes()))", "true", scenario("TestTryIsNotRefusedForAReaderThatIsBeingAcquired")},
	{"a try is refused for a lock that was lost", "internal/localqueue/queue.go", "t.acq.Until() > now && t.acq.Lost() == nil }", "t.acq.Until() > now }", checker{"./internal/localqueue", "^TestLostAcquisitionServesNobody$", nil}},
	{"a try overtakes those that wait", "internal/localqueue/queue.go", "	if !waiting {\n", "	if true {\n", scenario("TestTryIsServedLocallyOrFailsWithoutACall")},
	{"a try begins a turn", "internal/localqueue/queue.go", "	t.ends = clock.Past\n", "	t.ends = clock.Never\n", scenario("TestTryIsServedLocallyOrFailsWithoutACall")},
	{"an error ends one wait", "internal/localqueue/queue.go", "			q.end(w, err)\n		}\n	}\n	q.acquireInBackground(", "			q.end(w, err)\n			break\n		}\n	}\n	q.acquireInBackground(", scenario("TestFirstErrorEndsAllWaits")},
	{"a grant is thrown away as the head gives up", "internal/acquisition/acquisition.go", "(a.state == held || a.state == pending && a.queued)", "a.state == pending && a.queued",
		checker{"./internal/acquisition", "^TestGrantOutlivesTheCallerWhoShares$", []string{"-timeout=20s"}}},
	{"a holder that is lost counts for the waiters", "internal/localqueue/queue.go", "if t.write && t.acq.Lost() == nil {", "if t.write {", scenario("TestFirstErrorIsReturnedWhileALossIsTold")},
	{"a call whose context panics keeps its place", "internal/node/call.go",
		"	inBackground := false\n	defer func() {\n		if !inBackground { // also if ctx panics\n			place.Free()\n		}\n	}()\n	if ctx.Done() == nil {\n		return n.Run(",
		"	inBackground := ctx.Done() != nil\n	defer func() {\n		if !inBackground {\n			place.Free()\n		}\n	}()\n	if !inBackground {\n		return n.Run(",
		scenario("TestCallWhoseContextPanicsKeepsNoPlace")},
	{"a queue that Redis has acknowledged ends with an error", "internal/localqueue/queue.go", "	t.acq.Share(q.acknowledged)\n", "	t.acq.Share(false)\n", scenario("TestQueueOutlivesErrors")},
	{"the head's panic stops the queue", "internal/localqueue/queue.go", "		if mine != nil {\n			q.onAcquired(mine, acquisition.ErrRetry)\n		}\n", "", scenario("TestQueueGoesOnAfterAPanic|TestOthersAreServedWhenTheHeadPanics")},
	{"an acquire whose hook has panicked is not withdrawn", "internal/acquisition/acquisition.go", "		if !returned {\n			a.Withdraw()\n", "		if !returned && false {\n			a.Withdraw()\n", scenario("TestQueueGoesOnAfterAPanic")},
	{"a loss during an unlock drops the next acquisition", "internal/localqueue/lock.go", "	case next != nil:\n		t.queue.acquireInBackground(next)\n", "	case next != nil && err == nil:\n		t.queue.acquireInBackground(next)\n", checker{"./internal/localqueue", "^TestLossDuringAnUnlockIsNotTheEndOfTheQueue$", nil}},

	// The bound of WithMaxHold.
	{"an overdue lock is renewed", "internal/acquisition/acquisition.go", "		p.Node.Renewer.LetExpire(&p.Lease)\n", "		_ = p\n", scenario("TestLockThatIsHeldForTooLongEnds")},
	{"an overdue lock is renewed again when its last renewal is answered", "internal/node/renewer.go", "	if l.task == expire { // the call was under way\n		l.due, l.exact = clock.Never, true\n	}\n", "", scenario("TestRenewalUnderWayIsTheLastOne")},
	{"a turn goes on after an overdue lock", "internal/localqueue/lock.go", "	t.ends = clock.Past\n	if", "	if", scenario("TestOverdueReaderEndsItsTurnAndNotTheOthers")},
	{"an overdue reader ends the others", "internal/localqueue/turn.go", "if !l.overdue {", "if l == nil {", scenario("TestOverdueReaderEndsItsTurnAndNotTheOthers")},
	{"a node that has ended an overdue lock first is acquired again", "internal/acquisition/part.go", "(a.expiring || !a.nodes().heldSince(from))", "!a.nodes().heldSince(from)", scenario("TestLockThatIsHeldForTooLongEnds")},
	{"a nested lock counts from its own grant", "internal/localqueue/lock.go", "l.user, l.since = u, outer.since", "l.user, l.since = u, clock.Now()", scenario("TestNestedLocksCountFromTheOutermost")},
	{"a holder that is downgraded again and again does not listen", "internal/node/renewer.go", "		rn.node.Mailbox.StayOpen(l.terms().TTL)\n", "", scenario("TestHolderListensAfterDowngrades")},
	{"a wait that has run out tries on behind its own process", "internal/node/node.go", " && !n.Renewer.keeps(number)", " && number > 0", scenario("TestWaitBehindTheOwnProcessEndsInTime")},
	{"a call waits for the overdue lock that it is nested in", "internal/localqueue/lock.go", "	case l.overdue:\n		return fmt", "	case l.overdue:\n		return acquisition.ErrRetry\n		return fmt", scenario("TestNothingWaitsForTheOverdueLockItIsNestedIn")},
	{"another unlock takes from the owner what it has locked since", "reentry.go", "len(o.locks) == 0 && owners.m[o.name] == o", "len(o.locks) == 0", scenario("TestSecondUnlockForgetsNoLaterLockOfTheOwner")},
	{"an owner waits for its own overdue lock", "reentry.go", "	if outer == nil && overdue != nil {", "	if false {", scenario("TestNothingWaitsForTheOverdueLockItIsNestedIn")},
	{"an overdue lock is its owner's no more", "reentry.go", "		if cause != ErrMaxHold {\n			defer", "		if true {\n			defer", scenario("TestNothingWaitsForTheOverdueLockItIsNestedIn")},
	{"a lock that is unlocked is kept until its time would be over", "maxhold.go", "	b.lock = nil\n", "", scenario("TestUnlockedLockIsNotKept")},
	{"a lock that is unlocked is still counted", "internal/localqueue/lock.go", "	t.remove(l)\n", "", checker{"./internal/localqueue", "^TestHolderHasLeftBeforeTheNextIsGranted$", nil}},
	{"a release goes behind the acquire for another node", "internal/acquisition/release.go", "a.parts()[slices.Index(a.Config.Nodes, n)]", "a.parts()[len(a.parts())-1-slices.Index(a.Config.Nodes, n)]", scenario("TestQueueIsSharedWhateverTheOrderOfTheNodes")},
	{"a holder's acknowledgement is the waiters'", "internal/localqueue/queue.go", "		q.acknowledged = false\n		return nil\n", "		return nil\n", scenario("TestFirstErrorIsReturnedWhileOthersHold")},
	{"the release goes in front of the acquire in a script", "lua/both.lua", "local last = ARGV[1] + 1\n", "local last = ARGV[1] + 1\nother(KEYS, {unpack(ARGV, last + 1)})\n", ofScripts("TestNobodyComesBetweenAnAcquireAndTheReleaseBehindIt")},
	{"what a release behind an acquire leaves is not handed on", "internal/node/call.go", "		return n.handOn(sent, end, second, r, err)\n", "		_ = end\n		return r, err\n", scenario("TestReleaseBehindAnAcquireHandsOnToAll")},
	{"a lost reply to a release behind an acquire is not noticed", "internal/acquisition/release.go", "	n.LookForLostGrants(p.acq.Keys.Name(), start, false, r, err)\n", "	if front == nil {\n		n.LookForLostGrants(p.acq.Keys.Name(), start, false, r, err)\n	}\n", scenario("TestLostReplyToAReleaseBehindAnAcquireDelaysNobody")},
	{"a full Redis releases nothing behind an acquire", "lua/both.lua", "pcall(acquire, ", "true, acquire(", ofScripts("TestFullRedisReleasesBehindAnAcquire")},
	{"an acquire that failed within a script is a strange reply", "internal/script/reply.go", "len(failed) == 1", "len(failed) == 0", ofScripts("TestFullRedisReleasesBehindAnAcquire")},
	{"every event looks at all readers", "internal/localqueue/queue.go", "	q.drop(t)\n	if q.aside == nil {", "	if q.aside == nil {", checker{"./internal/localqueue", "^TestEventsLookAtTheReadersOfATurnOnly$", nil}},
	{"a read lock of a write acquisition admits a write lock", "internal/localqueue/lock.go", "	case write && !g.write:", "	case false:", scenario("TestReaderOfAWriteAcquisitionCannotWrite")},
	{"the head behind an overdue lock asks when that has ended", "internal/localqueue/lock.go", "		q.putAside(t)\n", "", scenario("TestNobodyOvertakesTheHeadBehindAnOverdueLock")},
	{"a reader that is overdue keeps a write acquisition", "internal/localqueue/lock.go", "	if t.users < 0 { // else endTurns does it", "	if true {", scenario("TestOverdueReaderOfAWriteAcquisitionLetsOthersRead")},
	{"a queue is not forgotten", "internal/localqueue/registry.go", "	if q.requests == 0 {\n", "	if false {\n", scenario("TestQueuesComeAndGo")},

	// Renewals under overload.
	{"what is renewed under overload ends before the answer", "internal/node/renewer.go", "l.terms().TTL/4) }", "2*l.retryAfter()) }", checker{"./internal/acquisition", "^TestOverloadLosesNoMoreThanTheExcess$", nil}},
	{"a sender waits for a connection with what it has taken", "internal/node/senders.go", " && len(*ss) < n.pipelines", "", checker{"./internal/acquisition", "^TestOverloadLosesNoMoreThanTheExcess$", nil}},
	{"what would be renewed too late is given up", "internal/node/renewer.go", "now.Add(max(left/2, minPause)), true", "clock.Never, true", checker{"./internal/acquisition", "^TestNothingIsLostThatCanStillBeRenewed$", nil}},
	{"a slow renewal is made twice", "internal/node/renewer.go", "max(2*l.retryAfter(), min(rn.expected(l)+l.retryAfter(), left-rn.expected(l)))", "2 * l.retryAfter()", checker{"./internal/acquisition", "^TestSlowRenewalIsNotMadeTwice$", nil}},
	{"a slow renewal that hangs is repeated too late", "internal/node/renewer.go", "min(rn.expected(l)+l.retryAfter(), left-rn.expected(l))", "rn.expected(l)+l.retryAfter()", checker{"./internal/acquisition", "^TestCallThatHangsLosesNothing$", nil}},
	{"pipelines have the connections of other calls", "internal/node/client.go", "			c.pipelines = redis.DefaultPipelinePoolSize\n", "			c.pipelines = c.connections\n", checker{"./internal/acquisition", "^TestCallThatHangsLosesNothing$", nil}},
	{"one sender puts off what others could renew", "internal/node/renewer.go", "ready > batch*rn.node.maxSenders()", "ready > batch", checker{"./internal/acquisition", "^TestStallLosesNothingThatSeveralSendersCanRenew$", nil}},

	// The seams between the packages.
	{"an answer that arrives for a part that was replaced counts", "internal/acquisition/part.go", "return p.acq.parts()[p.index()] == p && (", "return (", scenario("TestForeignCodeMayCallTheLibrary")},
	{"a renewal that is answered \"gone\" is not reported", "internal/node/renewer.go", "return func() { l.owner.OnExpired(why) }", "return func() { _ = why }", sim},
	{"a renewal that is answered is not reported", "internal/node/renewer.go", "return func() { l.owner.OnRenewed(sent, r) }", "return nil", sim},
	{"a loss does not end the locks", "internal/acquisition/acquisition.go", "		n.acquisition.owner.OnLost(n.err)\n", "", sim},
	{"a queue does not hear of a loss", "internal/localqueue/turn.go", "	defer q.onLost(t)\n", "", scenario("TestLossEndsAllAndTheQueueGoesOn")},
	{"a lock that was lost keeps the others", "internal/localqueue/queue.go", "	t.scatter()\n", "", scenario("TestLostLockKeepsNoOther")},
	{"a lock that is granted to a call that panics is kept", "internal/localqueue/lock.go", "			go l.Unlock(context.Background())\n", "", scenario("TestLockThatIsGrantedAsTheContextPanicsIsUnlocked")},
	{"a caller that finds a loss does not tell it", "internal/localqueue/lock.go", "		tell()\n	}\n	q.mu.Lock()", "		go tell()\n	}\n	q.mu.Lock()", scenario("TestPanicOfAnotherLockReachesTheCallerThatFindsTheLoss")},
	{"a lock that is in use is withdrawn", "internal/acquisition/acquisition.go", "a.state == held && !a.used {", "a.state == held {", checker{"./internal/acquisition", "^TestLockInUseIsNotWithdrawn$", nil}},
	{"an owner is not told of a renewal", "internal/acquisition/part.go", "	a.owner.OnRenewed()\n", "", scenario("TestForgottenLockIsReleased")},
	{"a command names its keys in another order", "internal/script/command.go", "\"evalsha\", s.digest, \"4\", k.holder, &k.intents, &k.leases, &k.token)", "\"evalsha\", s.digest, \"4\", k.holder, &k.leases, &k.intents, &k.token)", model},

	// Crowds.
	{"a waiter for a lock on a closed client goes on", "internal/acquisition/part.go", " || lockerr.Has(err, lockerr.ClientClosed)", "", scenario("TestWaiterOnAClosedClientGetsAnError")},
	{"a renewal takes foreign data for lost data", "internal/node/renewer.go", "			why = lockerr.Foreign(r.Data)\n", "			why = ErrGone\n", scenario("TestWaitersGetErrNotLockForForeignData")},

	// Forgotten locks.
	{"a forgotten lock is renewed for ever", "internal/localqueue/turn.go", "		if forget != nil {\n", "		if false {\n", scenario("TestForgottenLockIsReleased")},
	{"a context that descends from a lock does not keep it", "lock.go", "	if u.lock.Value() == nil {\n		forget =", "	if true {\n		forget =", scenario("TestContextKeepsALock")},
	{"a forgotten lock leaves its context open", "lock.go", "	u.cancel(ErrUnlocked)\n	switch err", "	switch err", scenario("TestForgottenLockEndsItsContext")},

	// The trace.
	{"a trace does not hear of an end that comes before the grant", "trace.go", "	if c.over {\n		c.tellEnd()\n", "	if false {\n		c.tellEnd()\n", scenario("TestTraceTellsTheGrantBeforeTheEnd")},
	{"a trace does not hear of the end of a lock", "trace.go", "		c.over, c.cause = true, cause\n		if c.granted != nil {\n", "		c.over, c.cause = true, cause\n		if c.granted != nil && cause == ErrUnlocked {\n", sim},
	{"a trace that blocks is waited for", "trace.go", "		q.told = true\n		go t.run(m)\n", "		q.told = true\n		t.queue.mu.Unlock()\n		t.run(m)\n		t.queue.mu.Lock()\n", scenario("TestTraceThatBlocksHarmsNoLock")},
	{"a function of a trace ends the others", "trace.go", "		if !returned { // a function has ended the goroutine\n", "		if !returned && false {\n", scenario("TestTraceGoesOnAfterAFunctionThatEndsItsGoroutine")},
	{"what a trace misses is not counted", "trace.go", "		q.dropped++\n", "", scenario("TestTraceThatBlocksHarmsNoLock")},

	{"a background acquire that a hook ends is not made again", "internal/acquisition/part.go", "			if !returned && len(p.acq.parts()) == 1 {", "			if false && !returned {", scenario("TestHookThatEndsAnAcquireInTheBackgroundEndsNoWait")},
	{"a downgrade that a hook ends has no vote", "internal/acquisition/downgrade.go", "			defer func() { votes <- v }()\n			v = p.downgrade(context.WithoutCancel(ctx), front)\n", "			v = p.downgrade(context.WithoutCancel(ctx), front)\n			votes <- v\n", scenario("TestHookThatEndsADowngradeEndsTheCall")},
	{"a request that is not wanted any more is made", "internal/acquisition/several.go", "	if s.state != pending {\n", "	if false {\n", checker{"./internal/acquisition", "^TestSupersededRequestIsNotMade$", []string{"-timeout=20s"}}},

	// What an operator does, and what bounds a lock.
	{"a subscription that begins renews waiters, and not those whose acquire was under way", "internal/acquisition/part.go", "!p.granted && p.Node.Mailbox.Sweeps() != sweeps", "false", scenario("TestGrantBeforeTheSubscriptionIsNotMissed")},
	{"messages that are lost while a waiter asks are not noticed", "internal/mailbox/mailbox.go", "		clear(b.lost)\n		b.sweeps.Add(1)\n", "		clear(b.lost)\n", scenario("TestLostUnlockReplyDelaysNobody")},
	{"messages that are lost during a renewal are not noticed", "internal/node/renewer.go", "r.Status == script.Waiting && c.sweeps != l.Node.Mailbox.Sweeps()", "false", scenario("TestLostGrantIsLookedForWhateverIsUnderWay")},
	{"a release of what may never have stood in the queue grants nothing", "internal/acquisition/part.go", "p.MayExist = err != nil || ", "p.MayExist = ", scenario("TestLostGrantIsLookedForWhateverIsUnderWay")},
	{"a release of what was withdrawn while it asked grants nothing", "internal/acquisition/acquisition.go", "p.asking, p.in, p.Tombstone, p.MayExist = false, true, true, true", "p.asking, p.in, p.Tombstone = false, true, true", scenario("TestLostGrantIsLookedForWhateverIsUnderWay")},
	{"a release of what a node has not answered in time grants nothing", "internal/acquisition/several.go", "p.asking, p.Tombstone, p.MayExist = false, true, true", "p.asking, p.Tombstone = false, true", scenario("TestLostReplyToTheReleaseOfAnUnansweredAcquireDelaysNobody")},
	{"a grant that overtakes the reply to the acquire is not renewed often", "internal/acquisition/part.go", "			r.Status = script.Granted\n", "", scenario("TestSplitVoteIsResolvedThoughAGrantOvertakesTheReply")},
	{"a grant that overtakes the reply to a renewal is not renewed often", "internal/acquisition/part.go", "		p.checked++\n		p.Node.Renewer.RenewOften(&p.Lease)\n", "", scenario("TestSplitVoteIsResolvedThoughAGrantOvertakesARenewal")},
	{"a lost reply to the rest of a release is not noticed", "internal/node/call.go", "		if c.Releases() {\n			n.LookForLostGrants(c.Key(), sent, false, r, err)\n		}\n", "		_ = sent\n", scenario("TestLostGrantIsLookedForWhateverIsUnderWay")},
	{"a node that has lost a grant is polled", "internal/acquisition/part.go", "} else if p.checked == 1 {", "} else if p.granted {", scenario("TestNodeThatHasLostAGrantIsNotPolled")},
	{"a downgrade fails with the rest of what it hands on", "internal/node/call.go", "c.Releases() || err != nil && first.Status == script.Granted", "c.Releases()", scenario("TestDowngradeSucceedsThoughTheRestIsLost")},
	{"a node that is freed late has the others renewed", "internal/acquisition/several.go", "	case p.failed > 0:\n", "	default:\n", scenario("TestNodeThatIsFreedLateCostsNoRenewal")},
	{"a short TTL closes the mailbox", "internal/mailbox/mailbox.go", "open.After(b.open)", "true", scenario("TestHolderWithALongTTLListensAfterOneWithAShortOne")},
	{"a tombstone is revoked", "internal/node/id.go", " && mailbox[0] != '-'", "", scenario("TestRevokeTakesNoTombstone")},
	{"a foreign waiter is taken for one of ours", "lua/lib/foreign.lua", " or not is_waiter(call('ZRANGE', INTENTS, '0', '0')[1] or 'w')", "", ofScripts("TestForeignWaiterIsAnError")},
	{"a state counts ids", "inspect.go", "			longest[name] = p\n", "			g[name] = append(g[name], p)\n", scenario("TestTwoIDsOnOneNodeAreNoMajority")},
	{"a lock has the bound of its own mutex only", "maxhold.go", "	case own == 0:\n		return outer.maxHold\n", "	case own == 0:\n		return own\n", scenario("TestLockNestedInANestedOneEndsWithIt")},
	{"a wait returns the end of its own time", "rwmutex.go", "return nil, false, lockerr.Ended(r.ctx, r.keys.Name())", "return nil, false, err", scenario("TestWaitThatEndsWithTheContextReturnsItsError")},
}

func TestMutantsFollowTheCode(t *testing.T) {
	for _, m := range mutants {
		source, err := os.ReadFile(filepath.Join("../..", filepath.FromSlash(m.file)))
		if err != nil {
			t.Error(err)
		}
		if n := strings.Count(string(source), m.old); n != 1 {
			t.Errorf("%s: %s has %q %d times, want once", m.what, m.file, m.old, n)
		}
	}
}

// TestEveryMutantIsCaught runs all mutants; with -short, every fortieth, beginning with one that is caught soon.
func TestEveryMutantIsCaught(t *testing.T) {
	if !*run {
		t.Skip("runs only with -mutants, since it takes some minutes")
	}
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	for i, m := range mutants {
		t.Run(strings.ReplaceAll(m.what, " ", "-"), func(t *testing.T) {
			if testing.Short() && i%40 != 20 {
				t.Skip("all run without -short")
			}
			t.Parallel()
			out, failed := m.check(t, root)
			switch {
			case !failed:
				t.Errorf("%s: want %s in %s to fail, it passed", m.what, m.by.test, m.by.pkg)
			case !fails.MatchString(out) || strings.Contains(out, "[build failed]"):
				t.Errorf("%s: want a test to fail, go test itself failed:\n%s", m.what, out)
			default:
				t.Log(strings.TrimSpace(says.FindString(out)))
			}
		})
	}
}

var (
	fails = regexp.MustCompile(`(?m)^\s*--- FAIL: Test|^panic: `)
	says  = regexp.MustCompile(`(?m)^(\s+\w+_test\.go:\d+|panic): .*`)
)

// check runs the checker against the mutant and returns its output.
func (m mutant) check(t *testing.T, root string) (out string, failed bool) {
	path := filepath.Join(root, filepath.FromSlash(m.file))
	source, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(source), m.old); n != 1 {
		t.Fatalf("want %q once in %s, found it %d times: adapt the mutant to the code", m.old, m.file, n)
	}
	dir := t.TempDir()
	broken, overlay := filepath.Join(dir, filepath.Base(path)), filepath.Join(dir, "overlay.json")
	list, err := json.Marshal(map[string]any{"Replace": map[string]string{path: broken}})
	if err != nil {
		t.Fatal(err)
	}
	for file, text := range map[string][]byte{
		broken:  []byte(strings.Replace(string(source), m.old, m.new, 1)),
		overlay: list,
	} {
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	args := []string{"test", m.by.pkg, "-count=1", "-vet=off", "-timeout=2m", "-failfast", "-overlay=" + overlay, "-run=" + m.by.test}
	cmd := exec.CommandContext(ctx, "go", append(args, m.by.flags...)...)
	cmd.Dir = root
	text, err := cmd.CombinedOutput()
	return string(text), err != nil
}
