-- lock.lua: "I want to be the writer".
--
-- KEYS  1 holder, 2 intents, 3 leases, 4 token
-- ARGV  1 id, as "<mailbox>:<n>"
--       2 ttl, in ms
--       3 how: "join" or "try" (no trace is left when it fails), then ":" and
--         the class of the rank, "0" or "1" (before all of class "0")
--       4 (only of a quorum) score: the rank that the caller has on all nodes,
--         in µs, less the span of a class (see prelude.lua) in class "1"
-- Reply the fencing token, an integer, where nobody stands in the way, or as of
--       prelude.lua: granted, waiting, busy, buried or foreign;
--       gone for an id that has waited and whose lease has ended.

-- Nobody waits, and there is no lease, or none but tombstones of others and what
-- nobody holds with: that the holder key is free says the SET. The counter is there,
-- and ours: see prelude.lua.
local others = redis.call('EXISTS', KEYS[2], KEYS[3])
if others == 0 or others == 1 and redis.call('PTTL', KEYS[3]) > 0
	and not redis.pcall('ZSCORE', KEYS[3], '-' .. ARGV[1]) then
	local counter = redis.pcall('GET', KEYS[4])
	local last = tonumber(counter)
	if last and last >= 1e14 and last < 4e15 and string.format('%d', last) == counter
		and redis.call('PTTL', KEYS[4]) >= 0
		and redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
		-- The next token, as next_token of prelude.lua has it.
		if not ARGV[4] then
			local time = redis.call('TIME')
			return redis.call('INCRBY', KEYS[4], string.format('%d', math.max(1, time[1] * 1000000 + time[2] - last)))
		end
		local token = math.max(last + 1, ARGV[4] % 4e15)
		redis.call('SET', KEYS[4], string.format('%d', token), 'PX', '86400000')
		return token
	end
end

local kind, mine, score = 'w', false, tonumber(ARGV[4])
local held = ARGV[3] == 'join:0' and redis.call('TYPE', KEYS[1]).ok
local back = (held == 'set' or held == 'string' and redis.call('GET', KEYS[1]) ~= ARGV[1])
	and redis.call('ZRANGE', KEYS[2], '-1', '-1', 'WITHSCORES')

-- include queue.lua
-- include prelude.lua
-- include standing.lua
-- include enter.lua

return enter(kind, ARGV[1], ARGV[2], ARGV[3])
