-- rlock.lua: "I want to be a reader".
--
-- KEYS  1 holder, 2 intents, 3 leases, 4 token
-- ARGV  1 id, 2 ttl in ms, 3 how, 4 (only of a quorum) score: as in lock.lua
-- Reply as of prelude.lua: granted, waiting, busy, buried or foreign;
--       gone for an id that has waited and whose lease has ended.

local kind, mine, score = 'r', false, tonumber(ARGV[4])
local held = redis.call('TYPE', KEYS[1]).ok
local back = (held == 'set' or held == 'string') and redis.call('ZRANGE', KEYS[2], '-1', '-1', 'WITHSCORES')

-- Nobody waits, and nobody holds, or readers do whose keys are ours: those have a TTL,
-- and a lease. That some of the leases may have ended makes no difference to one more.
if held == 'none' and redis.call('EXISTS', KEYS[2]) == 0
	or held == 'set' and not back[1] and redis.call('PTTL', KEYS[1]) > 0 then
	local last = redis.call('ZRANGE', KEYS[3], '-1', '-1', 'WITHSCORES')
	local free = held == 'none' and not last[1]
	local known = held == 'set' and last[1] and redis.call('PTTL', KEYS[3]) >= 0 and redis.call('ZMSCORE', KEYS[3], '-' .. ARGV[1], ARGV[1])
	if free or known and not known[1] and not known[2] then
		local time = redis.call('TIME')
		local ends = string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[2])
		redis.call('ZADD', KEYS[3], ends, ARGV[1])
		redis.call('SADD', KEYS[1], ARGV[1])
		if free or tonumber(last[2]) < tonumber(ends) then
			redis.call('PEXPIREAT', KEYS[3], ends)
			redis.call('PEXPIREAT', KEYS[1], ends)
		end
		return 1 -- granted
	end
end

-- include queue.lua
-- include prelude.lua
-- include standing.lua
-- include enter.lua

return enter(kind, ARGV[1], ARGV[2], ARGV[3])
