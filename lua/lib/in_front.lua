-- lib/in_front.lua: what a waiter watches.

-- in_front returns how long, in ms, the lease in front of a place in the queue lasts: that of
-- the waiter before it; for the head, that of the writer or, if readers hold, the first of all
-- leases to end, which is no later than theirs.
local function in_front(index)
	local ends
	if index > 0 then
		local before = format('%d', index - 1)
		ends = call('ZSCORE', LEASES, string.sub(call('ZRANGE', INTENTS, before, before)[1], 2))
	elseif held == 'set' then
		ends = call('ZRANGE', LEASES, '0', '0', 'WITHSCORES')[2]
	else
		ends = now + call('PTTL', HOLDER)
	end
	return math.max((ends or now) - now, 0)
end
