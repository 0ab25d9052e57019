-- rlock.lua: acquire the lock for reading.
--
-- KEYS  1 holder, 2 intents, 3 leases, 4 token: see lib/keys.lua
-- ARGV  1 id, 2 TTL in ms, 3 "join" or "try" and the class, 4 (quorum only) score, 5 (one node
--       only) age: as in lock.lua
-- Reply granted (0), waiting, busy, gone, tombstoned or foreign, as in lock.lua; what is
--       under the token key does not matter to a reader.

-- include lib/keys.lua
local KIND, ID, TTL, HOW = 'r', ARGV[1], ARGV[2], ARGV[3]
local score, age = ARGV[4] and tonumber(ARGV[4]), ARGV[5] and tonumber(ARGV[5])

-- include fast/rlock.lua
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
if not fits('set') then
	return join()
end
call('ZADD', LEASES, format('%d', now + TTL), ID)
call('SADD', HOLDER, ID)
expire(true, true)
return reply(GRANTED)
