-- inspect.lua: the holders and the waiters of the lock. It changes nothing.
--
-- KEYS  1 holder, 2 intents, 3 leases, 4 token: see lib/keys.lua
-- ARGV  none
-- Reply {holder, holders, waiters, token, waiting, holding, clock}. Participants whose lease has ended
--       do not count; of many readers some LIMIT are there, and of many waiters the first LIMIT.
--       holder   "none", "string" for a writer, "set" for readers; or "foreign", and nothing
--                follows but "<type>:<key>" of the key that holds foreign data
--       holders  id, ms left of its lease; for each
--       waiters  kind .. id, rank in µs, ms left of its lease; for each, in order
--       token    the last fencing token, 0 if there is none
--       waiting  how many wait, and holding how many hold, among them at most BATCH whose lease
--                has ended
--       clock    the time of the server, in µs

-- include lib/keys.lua
-- include lib/clock.lua
-- include lib/last_token.lua
-- include lib/held.lua
-- include lib/foreign.lua

-- How many holders, and how many waiters, a reply has at most.
local LIMIT = 100

-- How many ended leases it looks for, to leave them out: each script that changes anything takes
-- out as many.
local BATCH = 250

local bad_key = foreign_key('w')
if bad_key then
	return {'foreign', call('TYPE', bad_key).ok .. ':' .. bad_key}
end

local holders, waiters = {}, {}
local holding, waiting = 0, call('ZCARD', INTENTS)
local ended = call('ZRANGEBYSCORE', LEASES, '-inf', format('%d', now), 'LIMIT', '0', format('%d', BATCH))
local most = format('%d', LIMIT + #ended)
for i, id in ipairs(ended) do
	if call('ZSCORE', INTENTS, 'w' .. id) or call('ZSCORE', INTENTS, 'r' .. id) then
		waiting = waiting - 1
	end
end

local function left(ends)
	return ends and tonumber(ends) - now or 0
end

if held == 'string' then
	holders, holding = {call('GET', HOLDER), call('PTTL', HOLDER)}, 1
elseif held == 'set' then
	holding = call('SCARD', HOLDER)
	for i, id in ipairs(ended) do
		holding = holding - call('SISMEMBER', HOLDER, id)
	end
	local ids = call('SRANDMEMBER', HOLDER, most)
	for i, ends in ipairs(call('ZMSCORE', LEASES, unpack(ids))) do
		if left(ends) > 0 and #holders < 2 * LIMIT then
			holders[#holders + 1], holders[#holders + 2] = ids[i], left(ends)
		end
	end
end

local intents = call('ZRANGE', INTENTS, '0', format('%d', most - 1), 'WITHSCORES')
for i = 1, #intents, 2 do
	local rank, ms = tonumber(intents[i + 1]), left(call('ZSCORE', LEASES, string.sub(intents[i], 2)))
	if ms > 0 and #waiters < 3 * LIMIT then
		waiters[#waiters + 1], waiters[#waiters + 2], waiters[#waiters + 3] = intents[i], rank < 0 and rank + SPAN or rank, ms
	end
end
return {holding > 0 and held or 'none', holders, waiters, last_token, waiting, holding, us}
