-- fast/hand_over.lua: from a writer, or the last reader, to a writer that waits. While a
-- writer holds there is nothing more to hand on.
--
-- Nothing is taken out of the intents before all keys have been looked at.

-- include lib/token.lua
-- include lib/message.lua
if writer_waits and last_token and (writer or holding_readers == 1 and call('SISMEMBER', HOLDER, ID) == 1) then
	local id = string.sub(head[1], 2)
	local mailbox, number = string.match(id, ADDRESS)
	local lease = redis.pcall('ZSCORE', LEASES, id)
	local ends = tonumber(lease)
	local own_ends = ends and (writer and ends or tonumber(call('ZSCORE', LEASES, ID)))
	if mailbox and own_ends and ends > now and own_ends > now then
		call('ZREM', INTENTS, head[1])
		call('ZREM', LEASES, id, ID)
		local token = next_token(score and head[2] % SPAN)
		call('SET', HOLDER, id, 'PXAT', lease)
		if now + ttl_of_leases <= math.max(ends, own_ends) then
			local longest = call('ZRANGE', LEASES, '-1', '-1', 'WITHSCORES')[2]
			if longest and (longest ~= lease or own_ends > ends) then
				expire(false, true, longest)
			end
		end
		own = string.match(ID, ADDRESS)
		send(mailbox, format('%d', token) .. ' ' .. number)
		if score or unpublished > 0 then
			return {RELEASED, 0, unpublished, message or ''}
		end
		return message or DONE
	end
end
