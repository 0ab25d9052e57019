-- lib/expiry.lua: every key lives as long as the longest lease, and no longer.

-- live_until has the keys live until a lease ends; also the holder key, if readers hold.
local function live_until(ends, readers)
	call('PEXPIREAT', LEASES, ends)
	call('PEXPIREAT', INTENTS, ends)
	if readers then
		call('PEXPIREAT', HOLDER, ends)
	end
end

-- expire looks for the longest lease. The keys live until was, if that is known.
local function expire(readers, was)
	local longest = call('ZRANGE', LEASES, '-1', '-1', 'WITHSCORES')[2]
	if longest and longest ~= was then
		live_until(longest, readers)
	end
end
