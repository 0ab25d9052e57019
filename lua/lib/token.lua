-- lib/token.lua: the fencing token, greater for each writer than for all before it.

-- include lib/last_token.lua

-- next_token makes the token of a new writer, and returns it. A quorum proposes the rank of
-- the request, and its token is no lower than that. The clock of a node has no part in it: the
-- nodes would not agree, and one whose clock is ahead would give tokens that the others do not
-- reach if it restarts empty.
local function next_token(proposal)
	if ttl_of_token > RECENT and not proposal then
		last_token = call('INCRBY', TOKEN, '1')
		return last_token
	end
	last_token = math.max(last_token + 1, proposal or us, FLOOR)
	call('SET', TOKEN, format('%d', last_token), 'PX', RETENTION)
	return last_token
end
