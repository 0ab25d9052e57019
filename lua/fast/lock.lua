-- fast/lock.lua: the lock is free, and nobody waits. The tokens are those of next_token.
--
-- None of the three keys exists, or only the leases do: with neither a holder nor a waiter
-- they hold nothing but tombstones.

-- include lib/keys.lua
local others = call('EXISTS', HOLDER, INTENTS, LEASES)
local free = others == 0
	or others == 1 and call('PTTL', LEASES) > 0 and not redis.pcall('ZSCORE', LEASES, '-' .. ID)

-- include lib/counter.lua
if free and not score and ttl_of_token > RECENT then
	local token = redis.pcall('INCRBY', TOKEN, '1')
	if type(token) == 'number' and token > FLOOR and token < SPAN then
		call('SET', HOLDER, ID, 'PX', TTL)
		return token
	elseif type(token) == 'number' then
		call('INCRBY', TOKEN, '-1') -- foreign data is as it was
	end
end

-- include lib/clock.lua
-- include lib/last_token.lua
free = free and last_token
if free then
	call('SET', HOLDER, ID, 'PX', TTL)
	if not score then
		local token = math.max(last_token + 1, us, FLOOR)
		call('SET', TOKEN, format('%d', token), 'PX', RETENTION)
		return token
	end
end

-- include lib/token.lua
if free then
	return next_token(score % SPAN)
end
