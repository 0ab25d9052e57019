-- enter.lua: what the two verbs that enter share, behind the prelude and
-- standing.lua.

-- behind returns the rank behind everyone of a class, so that neither a tie nor
-- a clock that steps back reorders them, and who waits right before it.
local function behind(class)
	local last = redis.call('ZRANGE', INTENTS, '-1', '-1', 'WITHSCORES')
	if last[1] and class < 0 and tonumber(last[2]) >= 0 then
		last = redis.call('ZREVRANGEBYSCORE', INTENTS, '(0', '-inf', 'WITHSCORES', 'LIMIT', '0', '1')
	end
	return math.max(us + class, (tonumber(last[2]) or class) + 1), last[1]
end

-- enter: granted if it fits and nobody who waits ranks before it. A try that
-- is not granted leaves nothing; anyone else joins. An id enters once: what is
-- in place already is said again, unless Redis is full. While more is left to settle nobody is
-- granted here: a waiter may be sending its enter again.
local function enter(kind, id, ttl, how)
	local data = foreign(kind)
	if data then
		return refuse(data)
	end
	redis.call('ZADD', LEASES, 'XX', '0', '') -- changes nothing, but a full Redis refuses it
	settle()
	if redis.call('ZSCORE', LEASES, '-' .. id) then
		return reply(BURIED)
	end
	local already = holding(kind, id, score and score % SPAN)
	if already then
		return already
	end
	local place, other = score, nil
	if score then
		other = before(score, kind .. id)
	else
		place, other = behind(string.sub(how, -1) == '1' and -SPAN or 0)
	end
	local ends = digits(now + ttl)
	if more == 0 and not other and (held == 'none' or held == 'set' and kind == 'r') then
		if kind == 'w' then
			redis.call('SET', HOLDER, id, 'PX', ttl)
			return reply(GRANTED, next_token(score))
		end
		redis.call('ZADD', LEASES, ends, id)
		redis.call('SADD', HOLDER, id)
		held = 'set'
		expire()
		return reply(GRANTED)
	end
	if string.sub(how, 1, 3) == 'try' then
		return reply(BUSY)
	end
	if redis.call('ZADD', INTENTS, 'NX', digits(place), kind .. id) == 0 then
		return standing(kind, id)
	end
	redis.call('ZADD', LEASES, ends, id)
	expire()
	return reply(WAITING, in_front(other))
end
