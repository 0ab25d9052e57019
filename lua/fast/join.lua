-- fast/join.lua: others hold, others wait, and the caller goes to the end of the queue.
--
-- There is nothing to hand on: a writer holds, or readers do whose leases have not ended, and
-- a writer is the first to wait.

-- include lib/keys.lua
-- include lib/clock.lua
-- include lib/held.lua
-- include lib/status.lua
-- include lib/expiry.lua
-- include lib/place.lua
-- include fast/back.lua
if back and back[1] and HOW == 'join:0' and (held == 'set' or call('GET', HOLDER) ~= ID)
	and call('PTTL', INTENTS) >= 0 and (KIND == 'r' or last_token) then
	local ttl_of_leases = call('PTTL', LEASES)
	local leases = ttl_of_leases >= 0 and call('ZMSCORE', LEASES, string.sub(back[1], 2), '-' .. ID)
	local at, ends = score or place_in_class(0, tonumber(back[2])), now + TTL
	local expiry = format('%d', ends)
	-- A caller that has a lease already has been here before.
	if leases and leases[1] and not leases[2] and at > tonumber(back[2])
		and (held == 'string' or call('ZCOUNT', LEASES, '0', format('%d', now)) == 0
			and string.sub(call('ZRANGE', INTENTS, '0', '0')[1], 1, 1) == 'w')
		and call('ZADD', LEASES, 'NX', expiry, ID) == 1 then
		call('ZADD', INTENTS, format('%d', at), KIND .. ID)
		if now + ttl_of_leases < ends then
			expire(held == 'set', true, expiry)
		end
		local wait = math.max(leases[1] - now, 0)
		return score and {WAITING, wait, 0, '', at} or -1 - wait
	end
end
