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

-- last_token returns the last token, 0 if there is none, and nil if the key holds foreign
-- data.
local function last_token()
	local counter = redis.pcall('GET', TOKEN)
	if not counter then
		return 0
	end
	local last = tonumber(counter)
	if last and last >= FLOOR and last < SPAN and format('%d', last) == counter and call('PTTL', TOKEN) >= 0 then
		return last
	end
end

-- raise_token raises the token by step, to the server's clock or, if there is one, to a
-- quorum's proposal, and returns it. The step is 1 for a new writer, and 0 for the writer in
-- place, whose counter may have expired: nobody else is granted meanwhile.
local function raise_token(last, step, proposal)
	if last > 0 and not proposal then
		return step == 0 and last or call('INCRBY', TOKEN, format('%d', math.max(step, us - last)))
	end
	local token = math.max(last > 0 and last + step or math.max(us, FLOOR), proposal or 0)
	call('SET', TOKEN, format('%d', token), 'PX', RETENTION)
	return token
end
