-- unlock.lua: "I am done", from a holder or a waiter.
--
-- KEYS  1 holder, 2 intents, 3 leases, 4 token
-- ARGV  1 id, 2 kind: "w" or "r"
--       3 (optional) how long, in ms, an enter of this id is refused: given
--         where one may still be under way; "" if it is not
--       4 (only of a quorum) score: as in lock.lua
-- Reply as of prelude.lua: left or gone; foreign where a key that it has to touch
--       holds foreign data. Then what is certainly the caller's own has been released:
--       its holder key, and its entries in those keys that are ours; a tombstone is
--       there if the leases are ours; and nothing has been handed on. Foreign is also
--       the reply where all has been released, but a waiter cannot be given its token.
--       It works on a full Redis: see prelude.lua.

local tombstone = ARGV[3] ~= '' and ARGV[3]
local score = tonumber(ARGV[4])
local mine = ARGV[2] == 'w' and redis.pcall('GET', KEYS[1]) == ARGV[1]
local alone = mine and not tombstone
local queue, left, head -- how long the intents and the leases live; who waits first, and where

-- A reader, where nobody waits, or a writer does, no lease has ended, and other
-- readers stay: nothing is to be handed on. Unless its lease is the longest, and the
-- keys are now to live less long, this is all there is to do.
local readers = ARGV[2] == 'r' and not tombstone and not score and redis.pcall('SCARD', KEYS[1])
if type(readers) == 'number' and readers > 0 and redis.call('PTTL', KEYS[1]) >= 0 then
	queue, left = redis.call('PTTL', KEYS[2]), redis.call('PTTL', KEYS[3])
	head = queue >= 0 and left >= 0 and redis.pcall('ZRANGE', KEYS[2], '0', '0', 'WITHSCORES')
	local writer = head and head[1] and string.sub(head[1], 1, 1) == 'w'
	if queue == -2 and left >= 0 or writer and readers > 1 then
		local time = redis.call('TIME')
		local now = time[1] * 1000 + math.floor(time[2] / 1000)
		local behind = redis.pcall('ZREVRANK', KEYS[3], ARGV[1])
		if type(behind) == 'number' and (behind > 0 or redis.call('ZCARD', KEYS[3]) == 1)
			and redis.call('ZCOUNT', KEYS[3], '0', string.format('%d', now)) == 0
			and redis.call('SREM', KEYS[1], ARGV[1]) == 1 then
			redis.call('ZREM', KEYS[3], ARGV[1])
			return 1 -- left
		end
	elseif writer then
		alone = redis.call('SISMEMBER', KEYS[1], ARGV[1]) == 1
	end
end

-- From a writer, or the last reader, to a writer that lives. Unless one of their leases
-- is the longest, as before, this is all there is to do: while a writer holds there is
-- nothing to settle. Nothing is taken out of the intents before all keys have been looked
-- at.
if alone then
	queue = queue or redis.call('PTTL', KEYS[2])
	if queue == -2 then
		return redis.call('DEL', KEYS[1])
	end
	head = head or queue >= 0 and redis.pcall('ZRANGE', KEYS[2], '0', '0', 'WITHSCORES') or {}
	local next = string.sub(head[1] or '', 1, 1) == 'w' and string.sub(head[1], 2)
	local mailbox, n = string.match(next or '', '^(.*):(%d+)$')
	left = left or mailbox and redis.call('PTTL', KEYS[3])
	local ends = mailbox and left >= 0 and redis.pcall('ZSCORE', KEYS[3], next)
	local own = type(ends) == 'string' and (mine and ends or redis.call('ZSCORE', KEYS[3], ARGV[1]))
	if own then
		local time = redis.call('TIME')
		local now = time[1] * 1000 + math.floor(time[2] / 1000)
		local counter = math.min(ends, own) > now
			and (now + left > math.max(ends, own)
				or mine and (redis.call('ZRANGE', KEYS[3], '-1', '-1')[1] ~= next or redis.call('ZCARD', KEYS[3]) == 1))
			and redis.pcall('GET', KEYS[4])
		local last = tonumber(counter)
		if last and last >= 1e14 and last < 4e15 and string.format('%d', last) == counter
			and redis.call('PTTL', KEYS[4]) >= 0 then
			redis.call('ZREM', KEYS[2], head[1])
			-- The next token, as next_token of prelude.lua has it.
			local token
			if score then
				token = math.max(last + 1, head[2] % 4e15)
				redis.call('SET', KEYS[4], string.format('%d', token), 'PX', '86400000')
			else
				token = redis.call('INCRBY', KEYS[4], string.format('%d', math.max(1, time[1] * 1000000 + time[2] - last)))
			end
			if mine then
				redis.call('ZREM', KEYS[3], next)
			else
				redis.call('ZREM', KEYS[3], next, ARGV[1])
			end
			redis.call('SET', KEYS[1], next, 'PXAT', ends)
			local message = string.format('%d', token) .. ' ' .. n
			if mailbox == string.match(ARGV[1], '^(.*):%d+$') then
				return score and {4, 0, 0, message} or message -- left
			end
			local told = redis.pcall('PUBLISH', mailbox, message)
			return type(told) ~= 'table' and 1 or {4, 0, 2} -- left; 2 = untold
		end
	end
end

-- include prelude.lua

local id, kind = ARGV[1], ARGV[2]
own = string.match(id, '^(.*):%d+$')
local data = foreign()
local intents, leases = not data or sorted(INTENTS), not data or sorted(LEASES)
local status = GONE
if mine then
	redis.call('DEL', HOLDER)
	held, status = 'none', LEFT
else
	if leases then
		if lives(redis.call('ZSCORE', LEASES, id)) then
			status = LEFT
		end
		shorter = redis.call('ZREM', LEASES, id) == 1
	end
	if intents then
		redis.call('ZREM', INTENTS, kind .. id)
	end
	if held == 'set' and redis.call('SREM', HOLDER, id) == 1 then
		held = redis.call('TYPE', HOLDER).ok
	end
end
if tombstone and leases then
	redis.call('ZADD', LEASES, digits(now + tombstone), '-' .. id)
end
if data then
	local last = leases and redis.call('ZRANGE', LEASES, '-1', '-1', 'WITHSCORES')[2]
	if last then
		redis.call('PEXPIREAT', LEASES, last)
	end
	return refuse(data)
end
if tombstone then
	drop()
	shorter = true
end
settle()
if blocked then
	return refuse(TOKEN)
end
return reply(status)
