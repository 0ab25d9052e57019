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
-- nobody holds with: that the holder key is free says the SET.
local others = redis.call('EXISTS', KEYS[2], KEYS[3])
if (others == 0 or others == 1 and redis.call('PTTL', KEYS[3]) > 0
		and not redis.call('ZSCORE', KEYS[3], '-' .. ARGV[1]))
	and redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
	local token = redis.pcall('INCR', KEYS[4])
	if type(token) == 'number' and token >= 1e14 then
		if not ARGV[4] then
			return token
		end
		-- The caller's proposal; the counter lives a day from now (prelude.lua).
		token = math.max(token, ARGV[4] % 4e15)
		redis.call('SET', KEYS[4], string.format('%d', token), 'PX', 86400000)
		return token
	end
	if token ~= 1 then -- somebody's data: as it was, and out again
		redis.call('DEL', KEYS[1])
		if type(token) == 'number' then
			redis.call('DECR', KEYS[4])
		end
	end
	-- A counter just made gets its seed below, where the holder finds itself
	-- in place; somebody's data is refused there.
end

local kind, mine, score = 'w', false, tonumber(ARGV[4])

-- include queue.lua
-- include prelude.lua
-- include standing.lua
-- include enter.lua

return enter(kind, ARGV[1], ARGV[2], ARGV[3])
