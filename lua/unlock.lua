-- unlock.lua: "I am done", from a holder or a waiter.
--
-- KEYS  1 holder, 2 intents, 3 leases, 4 token
-- ARGV  1 id, 2 kind: "w" or "r"
--       3 (optional) how long, in ms, an enter of this id is refused: given
--         where one may still be under way; "" if it is not
--       4 (only of a quorum) score: as in lock.lua
-- Reply as of prelude.lua: left or gone.

local tombstone = ARGV[3] ~= '' and ARGV[3]
local score = tonumber(ARGV[4])
local mine = ARGV[2] == 'w' and redis.pcall('GET', KEYS[1]) == ARGV[1]
local alone, popped = mine and not tombstone, nil

-- A reader, where nobody waits, or a writer does, no lease has ended, and other
-- readers stay: nothing is to be handed on. Unless its lease is the longest, and the
-- keys are now to live less long, this is all there is to do.
local readers = ARGV[2] == 'r' and not tombstone and not score and redis.pcall('SCARD', KEYS[1])
if type(readers) == 'number' and readers > 0 then
	local head = redis.call('ZRANGE', KEYS[2], '0', '0')[1]
	local writer = head and string.sub(head, 1, 1) == 'w'
	if not head or writer and readers > 1 then
		local time = redis.call('TIME')
		local now = time[1] * 1000 + math.floor(time[2] / 1000)
		local behind = redis.call('ZREVRANK', KEYS[3], ARGV[1])
		if behind and (behind > 0 or redis.call('ZCARD', KEYS[3]) == 1)
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
-- nothing to settle.
if alone then
	popped = redis.call('ZPOPMIN', KEYS[2])
	if not popped[1] then
		return redis.call('DEL', KEYS[1])
	end
	local next = string.sub(popped[1], 2)
	local mailbox, n = string.match(next, '^(.*):(%d+)$')
	local ends = mailbox and string.sub(popped[1], 1, 1) == 'w' and redis.call('ZSCORE', KEYS[3], next)
	local own = mine and ends or ends and redis.call('ZSCORE', KEYS[3], ARGV[1])
	if ends and own then
		local time = redis.call('TIME')
		local now = time[1] * 1000 + math.floor(time[2] / 1000)
		local last = math.min(ends, own) > now
			and (now + redis.call('PTTL', KEYS[3]) > math.max(ends, own)
				or mine and (redis.call('ZRANGE', KEYS[3], '-1', '-1')[1] ~= next or redis.call('ZCARD', KEYS[3]) == 1))
			and tonumber((redis.pcall('GET', KEYS[4])))
		if last then
			-- The next token, as next_token of prelude.lua has it.
			local token
			if score then
				token = math.max(last + 1, popped[2] % 4e15)
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
local status = GONE
if mine then
	redis.call('DEL', HOLDER)
	held, status = 'none', LEFT
else
	if lives(redis.call('ZSCORE', LEASES, id)) then
		status = LEFT
	end
	shorter = redis.call('ZREM', LEASES, id) == 1
	redis.call('ZREM', INTENTS, kind .. id)
	if held == 'set' and redis.call('SREM', HOLDER, id) == 1 then
		held = redis.call('TYPE', HOLDER).ok
	end
end
if tombstone then
	redis.call('ZADD', LEASES, digits(now + tombstone), '-' .. id)
	drop()
	shorter = true
end
settle(popped)
return reply(status)
