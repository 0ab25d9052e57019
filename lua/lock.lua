-- lock.lua: acquire the lock for writing.
--
-- KEYS  1 holder, 2 intents, 3 leases, 4 token: see lib/keys.lua
-- ARGV  1 id, "<mailbox>:<n>"
--       2 TTL of the lease, in ms
--       3 "join" to wait if others are in the way, or "try" to leave no trace; then ":" and
--         the class of the rank: "1" goes before all of "0"
--       4 (quorum only) score: the caller's place in the queue of every node: its rank in µs,
--         in class "1" less the span of a class (lib/counter.lua); "" if an age follows
--       5 (one node only, optional) age: how long, in µs, the request has waited in its
--         process: it takes the place that it would have had (lib/place.lua)
-- Reply as in lib/status.lua:
--       granted     the fencing token; also if the id holds already
--       waiting     the id is in the queue; also if it was before
--       busy        a try, and others are in the way: the id of a holder or of the first waiter
--       gone        the id has waited, and its lease has ended
--       tombstoned  the id has been released with a tombstone
--       foreign     a key holds foreign data; nothing has changed
--       A full Redis replies with an error (OOM); nothing has changed.

-- include lib/keys.lua
local KIND, ID, TTL, HOW = 'w', ARGV[1], ARGV[2], ARGV[3]
local score, age = ARGV[4] and tonumber(ARGV[4]), ARGV[5] and tonumber(ARGV[5])

-- include fast/lock.lua
-- include fast/join.lua

-- include lib/clock.lua
-- include lib/token.lua
-- include lib/held.lua
-- include lib/expiry.lua
-- include lib/status.lua
-- include lib/message.lua
-- include lib/reply.lua
-- include lib/in_front.lua
-- include lib/foreign.lua
-- include lib/hand_on.lua
-- include lib/standing.lua
-- include lib/place.lua
-- include lib/acquire.lua

local answer = begin()
if answer then
	return answer
end
if not fits('nobody') then
	return join()
end
call('SET', HOLDER, ID, 'PX', TTL)
return reply(GRANTED, next_token(score and score % SPAN))
