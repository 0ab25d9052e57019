-- lib/expiry.lua: the leases, the intents and the readers' holder key live as long as the
-- longest lease, and no longer.

-- expire has the keys live until the longest lease ends, which is looked up if it is not
-- passed: the leases, the intents, unless it is known that nobody waits, and the holder key,
-- if readers hold.
local function expire(readers, waiters, longest)
	longest = longest or call('ZRANGE', LEASES, '-1', '-1', 'WITHSCORES')[2]
	if longest then
		call('PEXPIREAT', LEASES, longest)
		if waiters then
			call('PEXPIREAT', INTENTS, longest)
		end
		if readers then
			call('PEXPIREAT', HOLDER, longest)
		end
	end
end
