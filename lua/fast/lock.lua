-- fast/lock.lua: the lock is free, and nobody waits.
--
-- There are no leases, or none but tombstones of others: if one key exists, and the leases
-- have a TTL, it is they.

-- include lib/keys.lua
-- include lib/clock.lua
-- include lib/last_token.lua
local others = call('EXISTS', HOLDER, INTENTS, LEASES)
local free = last_token and (others == 0
	or others == 1 and call('PTTL', LEASES) > 0 and not redis.pcall('ZSCORE', LEASES, '-' .. ID))
if free then
	call('SET', HOLDER, ID, 'PX', TTL)
	if last_token > 0 and not score then
		return call('INCRBY', TOKEN, format('%d', token_step)) -- as next_token has it
	end
end

-- include lib/token.lua
if free then
	return next_token(score and score % SPAN)
end
