-- lib/standing.lua: whether the caller holds, waits, or neither.

-- less compares as sorted sets do, byte by byte: Lua's own < depends on the server's locale.
local function less(a, b)
	for i = 1, math.min(#a, #b) do
		local x, y = string.byte(a, i), string.byte(b, i)
		if x ~= y then
			return x < y
		end
	end
	return #a < #b
end

-- precedes reports whether a waiter ranks before the caller, which stands at its own place. Equals
-- are in the order of their names, as in the sorted set.
local function precedes(own_place)
	local first = call('ZRANGE', INTENTS, '0', '0', 'WITHSCORES')
	local at = tonumber(first[2])
	return at and (at < own_place or at == own_place and less(first[1], KIND .. ID))
end

local function is_writer()
	return held == 'string' and call('GET', HOLDER) == ID
end

-- writers_token returns the token of the writer in place, raised to the proposal, if there is
-- one: nobody else is granted meanwhile. The counter may have expired.
local function writers_token(proposal)
	if last_token == 0 or last_token and proposal and proposal > last_token then
		return next_token(proposal or score and score % SPAN)
	elseif proposal then
		call('PEXPIRE', TOKEN, RETENTION)
	end
	return last_token
end

-- holding returns the reply to a holder, nil if the caller is none.
local function holding(proposal)
	local token
	if is_writer() then
		token = writers_token(proposal)
	elseif held ~= 'set' or call('SISMEMBER', HOLDER, ID) == 0 or not lives(call('ZSCORE', LEASES, ID)) then
		return nil
	end
	if score and precedes(score) then
		preceded = PRECEDED
	end
	return reply(GRANTED, token)
end

-- standing returns the reply to a holder, a waiter, or neither; of these, one with a tombstone was
-- released by somebody else, or it would not ask.
local function standing(proposal)
	local index = call('ZRANK', INTENTS, KIND .. ID)
	if index and lives(call('ZSCORE', LEASES, ID)) then
		return reply(WAITING, in_front(index))
	end
	return holding(proposal) or reply(lives(call('ZSCORE', LEASES, '-' .. ID)) and TOMBSTONED or GONE)
end
