-- fast/rlock.lua: nobody waits, and nobody holds, or readers do. That the leases of some of
-- them may have ended makes no difference to one more.

-- include lib/keys.lua
-- include lib/clock.lua
-- include lib/held.lua
-- include lib/status.lua
-- include lib/expiry.lua
-- include fast/back.lua
local alone = held == 'none' and call('EXISTS', INTENTS, LEASES) == 0
local ttl_of_readers = held == 'set' and not back[1] and call('PTTL', LEASES) or -2
local known = ttl_of_readers >= 0 and call('ZMSCORE', LEASES, '-' .. ID, ID)
if alone or known and not known[1] and not known[2] then
	local ends = now + TTL
	local expiry = format('%d', ends)
	call('ZADD', LEASES, expiry, ID)
	call('SADD', HOLDER, ID)
	if now + ttl_of_readers < ends then
		expire(true, false, expiry)
	end
	return DONE
end
