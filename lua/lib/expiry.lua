-- lib/expiry.lua: every key lives as long as the longest lease, and no longer.

-- expire has the keys live until the longest lease ends, which is looked up if it is not
-- passed; also the holder key, if readers hold.
local function expire(readers, longest)
	longest = longest or call('ZRANGE', LEASES, '-1', '-1', 'WITHSCORES')[2]
	if longest then
		call('PEXPIREAT', LEASES, longest)
		call('PEXPIREAT', INTENTS, longest)
		if readers then
			call('PEXPIREAT', HOLDER, longest)
		end
	end
end
