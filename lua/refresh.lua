-- refresh.lua: "I am still here", from a holder or a waiter.
--
-- KEYS  1 holder, 2 intents, 3 leases, 4 token; a writer that holds may pass
--       the holder alone: while it holds there is nothing to hand on, and a
--       slot that is migrating answers TRYAGAIN to several keys of which some
--       do not exist.
-- ARGV  1 id, 2 ttl in ms, 3 kind: "w" or "r" (only with all the keys); a
--       writer that says "r" becomes a reader: downgrade
--       4 (only of a quorum) score: as in lock.lua
--       5 (only of a quorum) a fencing token that a writer's is raised to, if
--         it holds
-- Reply with the holder alone: 1 held, 0 not held as a writer;
--       else as of prelude.lua: granted, waiting, gone or foreign. It never
--       enters anyone. It works on a full Redis: see prelude.lua.

if #KEYS == 1 then
	if redis.pcall('GET', KEYS[1]) == ARGV[1] then
		return redis.call('PEXPIRE', KEYS[1], ARGV[2])
	end
	return 0
end

-- A waiter or a reader that holds, where nothing is to be handed on: no lease has ended,
-- and a writer holds, or nobody waits, or a writer waits for readers. The keys that are
-- written are ours. Of a quorum a reader that holds takes this path only if nobody waits: the
-- reply would have to tell who waits before it.
local held, score = redis.call('TYPE', KEYS[1]).ok, ARGV[4]
if (held == 'string' or held == 'set') and redis.call('PTTL', KEYS[1]) >= 0 then
	local queue, left = redis.call('PTTL', KEYS[2]), redis.call('PTTL', KEYS[3])
	local place = left >= 0 and queue >= 0 and redis.pcall('ZRANK', KEYS[2], ARGV[3] .. ARGV[1])
	local waits = type(place) == 'number'
	if waits or held == 'set' and ARGV[3] == 'r' and left >= 0 and (queue == -2 or queue >= 0 and not score)
		and redis.call('SISMEMBER', KEYS[1], ARGV[1]) == 1 then
		local time = redis.call('TIME')
		local now = time[1] * 1000 + math.floor(time[2] / 1000)
		local ends, front = now + ARGV[2], nil
		local expiry = string.format('%d', ends)
		-- The ZREM changes nothing. It cannot grow memory, and the ZADD may.
		if redis.pcall('ZCOUNT', KEYS[3], '0', string.format('%d', now)) == 0
			and (held == 'string' or queue == -2
				or string.sub(redis.pcall('ZRANGE', KEYS[2], '0', '0')[1] or '', 1, 1) == 'w')
			and redis.call('ZREM', KEYS[3], '') == 0
			and redis.call('ZADD', KEYS[3], 'XX', 'GT', 'CH', expiry, ARGV[1]) == 1 then
			if now + left < ends then
				redis.call('PEXPIREAT', KEYS[3], expiry)
				if queue >= 0 then
					redis.call('PEXPIREAT', KEYS[2], expiry)
				end
				if held == 'set' then
					redis.call('PEXPIREAT', KEYS[1], expiry)
				end
			end
			if not waits then
				return score and {1, 0, 0, '', 0} or 1 -- granted
			elseif place > 0 then
				local before = string.format('%d', place - 1)
				front = redis.call('ZSCORE', KEYS[3], string.sub(redis.call('ZRANGE', KEYS[2], before, before)[1], 2))
			elseif held == 'set' then
				front = redis.call('ZRANGE', KEYS[3], '0', '0', 'WITHSCORES')[2]
			else
				front = now + redis.call('PTTL', KEYS[1])
			end
			local wait = math.max((front or now) - now, 0)
			if not score then
				return -1 - wait -- waiting
			end
			local last = redis.call('ZRANGE', KEYS[2], '-1', '-1', 'WITHSCORES')[2]
			return {2, wait, 0, '', tonumber(last)}
		end
	end
end

local mine, score = false, tonumber(ARGV[4])

-- include prelude.lua
-- include standing.lua

-- The lease is extended if it is still alive. Whatever the answer, whoever's
-- lease has ended goes, and what is free is handed on; only then it is said how
-- the id stands, since that may have made it the holder.
local id, ttl, kind = ARGV[1], ARGV[2], ARGV[3]
local data = foreign(kind)
if data then
	return refuse(data)
end
redis.call('ZREM', LEASES, '') -- changes nothing, and a full Redis does not refuse it
local writer = writes(id)
if writer and kind == 'r' then
	-- No other writer comes in between, and readers in front join below.
	redis.call('ZADD', LEASES, digits(now + ttl), id)
	redis.call('DEL', HOLDER)
	redis.call('SADD', HOLDER, id)
	held, shorter = 'set', true
elseif writer then
	redis.call('PEXPIRE', HOLDER, ttl)
elseif lives(redis.call('ZSCORE', LEASES, id)) then
	redis.call('ZADD', LEASES, digits(now + ttl), id)
	shorter = true
end
drop()
settle()
return standing(kind, id, tonumber(ARGV[5]))
