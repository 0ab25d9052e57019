-- fast/refresh.lua: a waiter, or a reader that holds, where there is nothing to hand on: no
-- lease has ended, and a writer holds, or nobody waits, or a writer is the first to wait.
--
-- A reader of a quorum that holds comes this way only if nobody waits: the reply would have to
-- tell whether somebody waits before it.

-- include lib/keys.lua
-- include lib/clock.lua
-- include lib/held.lua
-- include lib/status.lua
-- include lib/expiry.lua
local renewed, own_index = false, nil
if held == 'string' or held == 'set' then
	local ttl_of_intents, ttl_of_leases = call('PTTL', INTENTS), call('PTTL', LEASES)
	local may_wait = ttl_of_leases >= 0 and ttl_of_intents >= 0
	own_index = may_wait and redis.pcall('ZRANK', INTENTS, KIND .. ID)
	own_index = type(own_index) == 'number' and own_index
	if own_index or held == 'set' and KIND == 'r' and ttl_of_leases >= 0
		and (ttl_of_intents == -2 or may_wait and not score) and call('SISMEMBER', HOLDER, ID) == 1 then
		local ends = now + TTL
		local expiry = format('%d', ends)
		-- The ZREM changes nothing. It cannot grow memory, and the ZADD may.
		renewed = redis.pcall('ZCOUNT', LEASES, '0', format('%d', now)) == 0
			and (held == 'string' or ttl_of_intents == -2
				or string.sub(redis.pcall('ZRANGE', INTENTS, '0', '0')[1] or '', 1, 1) == 'w')
			and call('ZREM', LEASES, '') == 0
			and call('ZADD', LEASES, 'XX', 'GT', 'CH', expiry, ID) == 1
		if renewed and now + ttl_of_leases < ends then
			expire(held == 'set', may_wait, expiry)
		end
	end
end
if renewed and not own_index then
	return score and {GRANTED, 0, 0, '', 0} or DONE
end

-- include lib/in_front.lua
if renewed then
	local wait = in_front(own_index)
	return score and {WAITING, wait, 0, '', tonumber(call('ZRANGE', INTENTS, '-1', '-1', 'WITHSCORES')[2])} or -1 - wait
end
