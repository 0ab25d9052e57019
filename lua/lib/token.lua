-- lib/token.lua: the fencing token, greater for each writer than for all before it.

-- include lib/last_token.lua

-- How long the counter lives, in ms. Of a quorum it lives so long after its last use, so that
-- the clocks of the nodes may differ.
local RETENTION = '86400000'

-- next_token makes the token of a new writer, and returns it. A quorum proposes the rank of
-- the request, so that the nodes agree; its token is no lower than that, or if the counter is
-- new, than the clock.
local function next_token(proposal)
	if last_token > 0 and not proposal then
		call('INCRBY', TOKEN, format('%d', token_step))
		last_token = last_token + token_step
		return last_token
	end
	last_token = math.max(last_token + (last_token > 0 and 1 or token_step), proposal or 0)
	call('SET', TOKEN, format('%d', last_token), 'PX', RETENTION)
	return last_token
end
