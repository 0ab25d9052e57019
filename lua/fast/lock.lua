-- fast/lock.lua: the lock is free, and nobody waits.
--
-- There are no leases, or none but tombstones of others. Only those have a TTL: if it is not
-- the leases that exist, that says -2.

local others = call('EXISTS', HOLDER, INTENTS, LEASES)
if last_token and (others == 0 or others == 1 and call('PTTL', LEASES) > 0 and not redis.pcall('ZSCORE', LEASES, '-' .. ID)) then
	call('SET', HOLDER, ID, 'PX', TTL)
	return next_token(score and score % SPAN)
end
