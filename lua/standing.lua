-- standing.lua: how does an id stand? For the verbs that say so, behind the
-- prelude.

-- token is the token of the writer in place, whose counter may have expired.
-- While it holds, it may raise that: nobody else is given one meanwhile.
local function token(proposal)
	return seeded(tonumber(redis.call('GET', TOKEN) or 1), proposal)
end

-- writes says whether id is the writer.
local function writes(id)
	return mine or held == 'string' and redis.call('GET', HOLDER) == id
end

-- in_front is how long, in ms, the lease in front of an intent lasts: that of
-- the intent before it or, for the head, that of the holder who is the first to
-- go.
local function in_front(other)
	local ends = nil
	if other then
		ends = redis.call('ZSCORE', LEASES, string.sub(other, 2))
	elseif held == 'set' then
		ends = redis.call('ZRANGE', LEASES, '0', '0', 'WITHSCORES')[2]
	else
		return math.max(redis.call('PTTL', HOLDER), 0)
	end
	return math.max((tonumber(ends) or now) - now, 0)
end

-- less compares as sorted sets do, byte by byte: Lua's own < depends on the
-- locale that the server runs in.
local function less(a, b)
	for i = 1, math.min(#a, #b) do
		local x, y = string.byte(a, i), string.byte(b, i)
		if x ~= y then
			return x < y
		end
	end
	return #a < #b
end

-- before returns who of those that wait is the last before a member of that
-- score. Equals are in the order of their names, as the sorted set has them.
local function before(s, member)
	local equals = redis.call('ZREVRANGEBYSCORE', INTENTS, digits(s), digits(s))
	for _, other in ipairs(equals) do
		if less(other, member) then
			return other
		end
	end
	return redis.call('ZREVRANGEBYSCORE', INTENTS, '(' .. digits(s), '-inf', 'LIMIT', '0', '1')[1]
end

-- holding is the reply to a holder, or nil where id is none.
local function holding(kind, id, proposal)
	local writer = writes(id)
	if not writer and not (held == 'set' and redis.call('SISMEMBER', HOLDER, id) == 1
		and lives(redis.call('ZSCORE', LEASES, id))) then
		return nil
	end
	if score and before(score, kind .. id) then
		preceded = 4
	end
	return reply(GRANTED, writer and token(proposal) or nil)
end

-- standing is the reply to a holder, a waiter, or neither.
local function standing(kind, id, proposal)
	local place = redis.call('ZRANK', INTENTS, kind .. id)
	if place and lives(redis.call('ZSCORE', LEASES, id)) then
		local other = place > 0 and redis.call('ZRANGE', INTENTS, digits(place - 1), digits(place - 1))[1]
		return reply(WAITING, in_front(other))
	end
	return holding(kind, id, proposal) or reply(GONE)
end
