-- fast/unlock_reader.lua: a reader, and there is nothing to hand on: nobody waits, or a writer
-- waits for other readers; and no lease has ended.
if holding_readers and ttl_of_leases >= 0 and (ttl_of_intents == -2 or writer_waits and holding_readers > 1) then
	local longer = redis.pcall('ZREVRANK', LEASES, ID) -- leases that end later than the caller's
	if type(longer) == 'number' and call('ZCOUNT', LEASES, '0', format('%d', now)) == 0
		and call('SREM', HOLDER, ID) == 1 then
		call('ZREM', LEASES, ID)
		if longer == 0 then
			expire(true, writer_waits)
		end
		return DONE
	end
end
