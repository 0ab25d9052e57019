-- lib/counter.lua: the counter of fencing tokens, and how it keeps up with the server's clock,
-- unless a quorum proposes the token (lib/token.lua).
--
-- A token is one more than the last, and no lower than the clock, in µs, was less than 10 ms
-- ago: a counter that has lived for longer is set by the clock, and begins its life again. So
-- a token is also greater than all before it if the counter has expired, was lost in a
-- restart, or is old on a replica that has taken over: no token is ahead of the clock, unless
-- that has been set back or a million grants a second were made, and no restart and no
-- failover takes less than 10 ms. To a counter that is there a clock that is set back does no
-- harm.

-- How long the counter lives, in ms, after it was set by the clock; of a quorum, after its
-- last use: the next token then begins with a rank, so the clocks of the processes may differ
-- by that much.
local RETENTION = '86400000'

-- How much of its life is left, in ms, while it is recent: the next token is counted.
local RECENT = 86399990

-- No counter of ours is below this: µs since 1970, in the year 1973.
local FLOOR = 1e14

-- The span of one class of ranks, in µs: more than any rank or token until the year 2096. A
-- score is the rank in class "0", and the rank less this in class "1".
local SPAN = 4e15

local ttl_of_token = call('PTTL', TOKEN)
