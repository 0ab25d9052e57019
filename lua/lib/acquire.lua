-- lib/acquire.lua: what lock and rlock share.

-- Where the caller would stand in the queue, and whether a waiter ranks before it.
local place, behind

-- rank finds that out. A caller that waits already keeps its place, whatever its age is now.
local function rank()
	if score then
		place, behind = score, precedes(score)
		return
	end
	local class = string.sub(HOW, -1) == '1' and -SPAN or 0
	local last = call('ZRANGE', INTENTS, '-1', '-1', 'WITHSCORES')
	if last[1] and class < 0 and tonumber(last[2]) >= 0 then
		last = call('ZREVRANGEBYSCORE', INTENTS, '(0', '-inf', 'WITHSCORES', 'LIMIT', '0', '1')
	end
	place, behind = place_in_class(class, tonumber(last[2]) or class), last[1]
	if age then
		place = tonumber(call('ZSCORE', INTENTS, KIND .. ID) or place)
		behind = precedes(place)
	end
end

-- begin hands on what is free, and returns the reply to a caller that is refused or holds
-- already: an id acquires once.
local function begin()
	local bad_key = foreign_key(KIND)
	if bad_key then
		return foreign(bad_key)
	end
	call('ZADD', LEASES, 'XX', '0', '') -- changes nothing, but a full Redis refuses it
	hand_on()
	if call('ZSCORE', LEASES, '-' .. ID) then
		return reply(TOMBSTONED)
	end
	rank()
	return holding(score and score % SPAN)
end

-- in_the_way returns the id of a holder that excludes the caller, or of the first waiter; "" if
-- neither is there.
local function in_the_way()
	if held == 'string' then
		return call('GET', HOLDER)
	elseif held == 'set' and KIND == 'w' then
		return call('SRANDMEMBER', HOLDER)
	end
	return string.sub(call('ZRANGE', INTENTS, '0', '0')[1] or '', 2)
end

-- fits reports whether the caller may hold beside those that do. It may not if a waiter ranks
-- before it, or while more is left to hand on: the caller may be a waiter that asks again.
local function fits(beside)
	return more == 0 and not behind and (held == 'none' or held == beside)
end

-- join has the caller wait, unless it tries or waits already.
local function join()
	if string.sub(HOW, 1, 3) == 'try' then
		return reply(BUSY, in_the_way())
	end
	if call('ZADD', INTENTS, 'NX', format('%d', place), KIND .. ID) == 1 then
		call('ZADD', LEASES, format('%d', now + TTL), ID)
		expire(held == 'set', true)
	end
	return standing()
end
