-- unlock.lua: "I am done", from a holder or a waiter.
--
-- KEYS  1 holder, 2 intents, 3 leases, 4 token
-- ARGV  1 id, 2 kind: "w" or "r"
--       3 (optional) how long, in ms, an enter of this id is refused: given
--         where one may still be under way
-- Reply 1 where a writer left and nobody waits, or the array
--       {status, value, flags} of prelude.lua: left or gone.

local mine = ARGV[2] == 'w' and redis.pcall('GET', KEYS[1]) == ARGV[1]
if mine and not ARGV[3] and redis.call('EXISTS', KEYS[2]) == 0 then
	return redis.call('DEL', KEYS[1])
end

-- include prelude.lua

return leave(ARGV[1], ARGV[2], ARGV[3])
