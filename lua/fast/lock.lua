-- fast/lock.lua: the lock is free, and nobody waits.
--
-- There are no leases, or none but tombstones of others. Only those have a TTL: if it is not
-- the leases that exist, that says -2.

-- include lib/keys.lua
-- include lib/clock.lua
-- include lib/token.lua
local others = call('EXISTS', HOLDER, INTENTS, LEASES)
if others == 0 or others == 1 and call('PTTL', LEASES) > 0 and not redis.pcall('ZSCORE', LEASES, '-' .. ID) then
	local last = last_token()
	if last then
		call('SET', HOLDER, ID, 'PX', TTL)
		return raise_token(last, 1, score and score % SPAN)
	end
end
