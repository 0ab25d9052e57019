-- lib/last_token.lua: the last fencing token, and the next one of a single node.

-- The span of one class of ranks, in µs: some 127 years, and more than any token. A score is
-- the rank in class "0", and the rank less this in class "1".
local SPAN = 4e15

-- No counter of ours is below this: µs since 1970, in the year 1973.
local FLOOR = 1e14

-- The last token: 0 if there is none, nil if the key holds foreign data.
local counter = redis.pcall('GET', TOKEN)
local last_token = counter and tonumber(counter) or 0
if counter and not (last_token >= FLOOR and last_token < SPAN and format('%d', last_token) == counter
	and call('PTTL', TOKEN) >= 0) then
	last_token = nil
end

-- By how much the next token is greater: it is no lower than the server's clock, in µs. So
-- also a token whose counter has expired, was lost in a restart, or is old on a replica that
-- has taken over, is greater than all before it, unless the clock has been set back, or a
-- million grants a second were made.
local token_step = last_token and math.max(us - last_token, last_token == 0 and FLOOR or 1)
