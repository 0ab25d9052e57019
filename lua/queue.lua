-- queue.lua: the fast path of an enter that has to wait: a writer holds, and
-- somebody waits already. Then there is nothing to hand on, and the keys are
-- ours, as the last waiter has a lease in them. It expects the locals kind and score.
if ARGV[3] == 'join:0' and redis.call('TYPE', KEYS[1]).ok == 'string'
	and redis.call('GET', KEYS[1]) ~= ARGV[1] then
	local last = redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')
	local leases = last[1] and redis.call('ZMSCORE', KEYS[3], string.sub(last[1], 2), '-' .. ARGV[1])
	if leases and leases[1] and not leases[2] then
		local time = redis.call('TIME')
		local us = time[1] * 1000000 + time[2]
		local now = math.floor(us / 1000)
		local ends = string.format('%d', now + ARGV[2])
		local rank = score or math.max(us, last[2] + 1)
		if rank > tonumber(last[2])
			and redis.call('ZADD', KEYS[2], 'NX', string.format('%d', rank), kind .. ARGV[1]) == 1 then
			redis.call('ZADD', KEYS[3], ends, ARGV[1])
			if now + redis.call('PTTL', KEYS[3]) < tonumber(ends) then
				redis.call('PEXPIREAT', KEYS[3], ends)
				redis.call('PEXPIREAT', KEYS[2], ends)
			end
			local wait = math.max(leases[1] - now, 0)
			return score and {2, wait, 0, '', rank} or {2, wait, 0} -- waiting
		end
	end
end
