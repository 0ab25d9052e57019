-- lib/token.lua: the fencing token, greater for each writer than for all before it.
--
-- A token is no lower than the server's clock in µs at the grant; of a quorum, than the rank
-- of the request, which is the same on all nodes: so they agree on the token. Therefore also
-- a token whose counter has expired, was lost in a restart, or is old on a replica that has
-- taken over, is greater than all before it, unless the clock has been set back, or a million
-- grants a second were made.

-- How long the counter lives, in ms. Of a quorum it lives so long after its last use, so that
-- the clocks of the nodes may differ.
local RETENTION = '86400000'

-- No counter of ours is below this: µs since 1970, in the year 1973.
local FLOOR = 1e14

-- The span of one class of ranks, in µs: some 127 years, and more than any token. A score is
-- the rank in class "0", and the rank less this in class "1".
local SPAN = 4e15

-- The last token: 0 if there is none, nil if the key holds foreign data.
local counter = redis.pcall('GET', TOKEN)
local last_token = counter and tonumber(counter) or 0
if counter and not (last_token >= FLOOR and last_token < SPAN and format('%d', last_token) == counter
	and call('PTTL', TOKEN) >= 0) then
	last_token = nil
end

-- next_token makes the token of a new writer, and returns it. A quorum proposes one.
local function next_token(proposal)
	local step = (proposal or us) - last_token
	if step < 1 then
		step = 1
	end
	if last_token > 0 and not proposal then
		call('INCRBY', TOKEN, format('%d', step))
		last_token = last_token + step
		return last_token
	end
	if last_token == 0 then
		step = math.max(step, us, FLOOR)
	end
	last_token = last_token + step
	call('SET', TOKEN, format('%d', last_token), 'PX', RETENTION)
	return last_token
end
