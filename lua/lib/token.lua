-- lib/token.lua: the fencing token, greater for each writer than for all before it.

-- include lib/last_token.lua

-- next_token makes the token of a new writer, and returns it. A quorum proposes the rank of
-- the request, so that the nodes agree; its token is no lower than that, or if the counter is
-- new, than the clock.
local function next_token(proposal)
	if ttl_of_token > RECENT and not proposal then
		last_token = call('INCRBY', TOKEN, '1')
		return last_token
	end
	local by_clock = (last_token == 0 or not proposal) and us or 0
	last_token = math.max(last_token + 1, by_clock, proposal or 0, FLOOR)
	call('SET', TOKEN, format('%d', last_token), 'PX', RETENTION)
	return last_token
end
