-- unlock.lua: "I am done", from a holder or a waiter.
--
-- KEYS  1 holder, 2 intents, 3 leases, 4 token
-- ARGV  1 id, 2 kind: "w" or "r"
--       3 (optional) how long, in ms, an enter of this id is refused: given
--         where one may still be under way
-- Reply as of prelude.lua: left or gone.

local mine = ARGV[2] == 'w' and redis.pcall('GET', KEYS[1]) == ARGV[1]
if mine and not ARGV[3] and redis.call('EXISTS', KEYS[2]) == 0 then
	return redis.call('DEL', KEYS[1])
end

-- include prelude.lua

local id, kind, tombstone = ARGV[1], ARGV[2], ARGV[3]
own = string.match(id, '^(.*):%d+$')
local status = GONE
if mine then
	redis.call('DEL', HOLDER)
	held, status = 'none', LEFT
else
	if lives(redis.call('ZSCORE', LEASES, id)) then
		status = LEFT
	end
	shorter = redis.call('ZREM', LEASES, id) == 1
	redis.call('ZREM', INTENTS, kind .. id)
	if held == 'set' and redis.call('SREM', HOLDER, id) == 1 then
		held = redis.call('TYPE', HOLDER).ok
	end
end
if tombstone then
	redis.call('ZADD', LEASES, digits(now + tombstone), '-' .. id)
	drop()
	shorter = true
end
settle()
return reply(status)
