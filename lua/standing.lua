-- standing.lua: how does an id stand? For the verbs that say so, behind the
-- prelude.

-- token is the token of the writer in place, whose counter may have expired.
local function token()
	return seeded(tonumber(redis.call('GET', TOKEN) or 1))
end

-- writes says whether id is the writer.
local function writes(id)
	return mine or held == 'string' and redis.call('GET', HOLDER) == id
end

-- in_front is how long, in ms, the lease in front of an intent lasts: that of
-- the intent before it or, for the head, that of the holder who is the first to
-- go.
local function in_front(before)
	local ends = nil
	if before then
		ends = redis.call('ZSCORE', LEASES, string.sub(before, 2))
	elseif held == 'set' then
		ends = redis.call('ZRANGE', LEASES, 0, 0, 'WITHSCORES')[2]
	else
		return math.max(redis.call('PTTL', HOLDER), 0)
	end
	return math.max((tonumber(ends) or now) - now, 0)
end

-- alien says whether the holder key holds somebody's data: nothing of ours is
-- without a TTL, and a set of ours has leases.
local function alien()
	return held ~= 'none' and (redis.call('PTTL', HOLDER) == -1
		or held == 'set' and redis.call('EXISTS', LEASES) == 0
		or held ~= 'set' and held ~= 'string')
end

-- refuse is the reply where a key holds somebody's data.
local function refuse(key)
	return reply(FOREIGN, redis.call('TYPE', key).ok .. ':' .. key)
end

-- holding is the reply to a holder, or nil where id is none.
local function holding(id)
	if writes(id) then
		return reply(GRANTED, token())
	end
	if held == 'set' and redis.call('SISMEMBER', HOLDER, id) == 1
		and lives(redis.call('ZSCORE', LEASES, id)) then
		return reply(GRANTED)
	end
end

-- standing is the reply to a holder, a waiter, or neither.
local function standing(kind, id)
	local place = redis.call('ZRANK', INTENTS, kind .. id)
	if place and alien() then
		return refuse(HOLDER)
	elseif place and lives(redis.call('ZSCORE', LEASES, id)) then
		local before = place > 0 and redis.call('ZRANGE', INTENTS, place - 1, place - 1)[1]
		return reply(WAITING, in_front(before))
	end
	return holding(id) or reply(GONE)
end
