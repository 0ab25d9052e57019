-- queue.lua: the fast path of an enter that has to wait: somebody holds, and
-- somebody waits already. Where that is a writer who waits for readers, or anybody
-- who waits for a writer, there is nothing to hand on. The keys are ours: they have a
-- TTL, and the last waiter has a lease in them; and so is the token that a writer will
-- need, as counts of prelude.lua has it. It expects the locals kind and score; held, the
-- type of the holder key; and back, who waits last, and where: a list, or false if
-- the caller holds already, or nobody does.
if back and back[1] and ARGV[3] == 'join:0'
	and redis.call('PTTL', KEYS[1]) >= 0 and redis.call('PTTL', KEYS[2]) >= 0 then
	local counter = kind == 'w' and redis.pcall('GET', KEYS[4])
	local last = tonumber(counter)
	local ours = not counter or last and last >= 1e14 and last < 4e15 and string.format('%d', last) == counter
		and redis.call('PTTL', KEYS[4]) >= 0
	local left = ours and redis.call('PTTL', KEYS[3])
	local leases = left and left >= 0 and redis.call('ZMSCORE', KEYS[3], string.sub(back[1], 2), '-' .. ARGV[1])
	if leases and leases[1] and not leases[2] then
		local time = redis.call('TIME')
		local us = time[1] * 1000000 + time[2]
		local now = math.floor(us / 1000)
		local rank = score or math.max(us, back[2] + 1)
		local ends = now + ARGV[2]
		local expiry = string.format('%d', ends)
		-- Among readers: the lease of none has ended, and the head waits for them to
		-- leave. Who has a lease already has been here before.
		if rank > tonumber(back[2]) and (held == 'string'
				or redis.call('ZCOUNT', KEYS[3], '0', string.format('%d', now)) == 0
				and string.sub(redis.call('ZRANGE', KEYS[2], '0', '0')[1], 1, 1) == 'w')
			and redis.call('ZADD', KEYS[3], 'NX', expiry, ARGV[1]) == 1 then
			redis.call('ZADD', KEYS[2], string.format('%d', rank), kind .. ARGV[1])
			-- The keys live at least as long as the last waiter's lease.
			if tonumber(leases[1]) < ends and now + left < ends then
				redis.call('PEXPIREAT', KEYS[3], expiry)
				redis.call('PEXPIREAT', KEYS[2], expiry)
				if held == 'set' then
					redis.call('PEXPIREAT', KEYS[1], expiry)
				end
			end
			local wait = math.max(leases[1] - now, 0)
			return score and {2, wait, 0, '', rank} or -1 - wait -- waiting
		end
	end
end
