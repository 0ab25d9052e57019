-- fast/hand_over.lua: from a writer, or the last reader, to a writer that waits. While a
-- writer holds there is nothing more to hand on.
--
-- Nothing is taken out of the intents before all keys have been looked at.

-- include lib/token.lua
-- include lib/message.lua
if writer_waits and (writer or readers == 1 and call('SISMEMBER', HOLDER, ID) == 1) then
	local id = string.sub(head[1], 2)
	local mailbox, number = address(id)
	local ends = redis.pcall('ZSCORE', LEASES, id)
	local own_ends = type(ends) == 'string' and (writer and ends or call('ZSCORE', LEASES, ID))
	local last = mailbox and own_ends and math.min(ends, own_ends) > now and last_token()
	if last then
		call('ZREM', INTENTS, head[1])
		if writer then
			call('ZREM', LEASES, id)
		else
			call('ZREM', LEASES, id, ID)
		end
		local token = raise_token(last, 1, score and head[2] % SPAN)
		call('SET', HOLDER, id, 'PXAT', ends)
		if now + ttl_of_leases <= math.max(ends, own_ends) then
			expire(false, ends)
		end
		own = address(ID)
		send(mailbox, format('%d', token) .. ' ' .. number)
		return reply(RELEASED)
	end
end
