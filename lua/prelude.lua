-- prelude.lua: what the four verbs share. Who holds, who waits, whose lease
-- has ended, who is next? It stands where a verb includes it: the verb's fast
-- path before it, the slow path behind it. It expects two locals: mine, whether
-- the caller is known to be the writer; and score, where the caller would stand
-- in the intents, or nil unless it is of a quorum. Who is of a quorum has the
-- same score on all its nodes, so that they agree who is next, and proposes it
-- as the token, so that they agree on that too.
--
-- The keys, all in one slot, each with a TTL:
--   HOLDER   string = the writer's id, its TTL the writer's lease;
--            or set = the readers' ids
--   INTENTS  sorted set of kind .. id by rank: who waits, in what order
--   LEASES   sorted set of id by end of lease, in ms of the server's clock:
--            readers and waiters; "-" .. id is a tombstone: that id may not
--            enter any more
--   TOKEN    the last fencing token
--
-- A reply is {status, value, flags, message, last}, or short where there is nothing
-- more to say: 1 for a grant or a leave, a token for a grant, the message for a
-- leave, and -1 - ms for who is waiting. The statuses and their values:
local GRANTED = 1 -- the fencing token, 0 for a reader
local WAITING = 2 -- ms until the lease in front ends
local BUSY    = 3 -- 0; a try found others in the way
local LEFT    = 4 -- 0
local GONE    = 5 -- 0; neither holder nor waiter
local BURIED  = 6 -- 0; a tombstone refuses this id
local FOREIGN = 7 -- "<type>:<key>", of a key that holds foreign data: another type, a
                  -- value without a TTL, or a token that is no counter of ours. The key
                  -- is left as it is; a release has released what is the caller's own.
-- The flags, added up: 1 = more is left to settle, call again;
-- 2 = PUBLISH was refused, so that those granted have not been told;
-- 4 = somebody waits whose score is before the caller's (only of a quorum).
-- The message is there where those granted are of the caller's own mailbox.
-- The last is the highest score that waits, 0 if none does (only of a quorum).
local more, untold, preceded = 0, 0, 0

-- A full Redis (maxmemory, noeviction) refuses a command that may grow memory, with OOM,
-- unless the script has made another write before. So a renewal and a release begin with
-- a write that cannot grow memory, and work; and an acquire begins with one that may, so
-- that it is refused in any case, before it has changed anything.

local HOLDER, INTENTS, LEASES, TOKEN = KEYS[1], KEYS[2], KEYS[3], KEYS[4]

-- How many participants one script moves at most. It bounds the time that the
-- server is busy with one script.
local BATCH = 250

-- How long a token counter lives, in ms. A token is no lower than the server's clock
-- in µs at the grant (of a quorum: than the rank of the request). So also one that
-- follows a counter that has expired, was lost in a restart, or is old on a replica
-- that has taken over, is greater than all before it, unless the clock has been set
-- back, or a million grants a second were made. Of a quorum it lives so long after
-- its last use, so that the clocks of the nodes may differ.
local RETENTION = '86400000'

-- No counter of ours is below this: µs since 1970, in the year 1973. Nor is one as high
-- as the span.
local FLOOR = 1e14

-- The span of one class of ranks, in µs: some 127 years. A score is the rank in
-- class "0", the rank less this in class "1".
local SPAN = 4e15

-- The server's clock is read once: before Redis 7.2 it moves within a script.
local time = redis.call('TIME')
local us = time[1] * 1000000 + time[2]
local now = math.floor(us / 1000)

-- What the holder key is: 'none', 'string', 'set', or what is no lock.
local held = mine and 'string' or redis.call('TYPE', HOLDER).ok
if held == 'set' and redis.call('PTTL', HOLDER) == -1 then
	held = 'alien' -- nobody may join it, or be taken out of it
end

-- Whether the longest lease may have ended or gone.
local shorter = false

-- Whether a writer would be granted, but the token is foreign data.
local blocked = false

-- What is to be published when all is in order: mailbox -> words. What is for the
-- caller's own mailbox an unlock takes back in its reply.
local news, own, carried = nil, nil, nil

-- Whole numbers from 1e14 up lose digits where Lua joins them to strings. And what is
-- handed to a command as a number Redis prints by itself, which takes longer than most
-- commands do: so all are handed over as strings, also those written here.
local function digits(n)
	return string.format('%d', n)
end

local function reply(status, value)
	if score then
		local last = status ~= FOREIGN and redis.call('ZRANGE', INTENTS, '-1', '-1', 'WITHSCORES')[2]
		return {status, value or 0, more + untold + preceded, carried or '', tonumber(last or 0)}
	end
	if not value and more + untold == 0 and not carried and (status == GRANTED or status == LEFT) then
		return 1
	end
	return {status, value or 0, more + untold, carried}
end

-- sorted says whether a key is a sorted set of ours, or is not there.
local function sorted(key)
	local left = redis.call('PTTL', key)
	return left == -2 or left >= 0 and redis.call('TYPE', key).ok == 'zset'
end

-- counts says whether the token is a counter of ours, or is not there.
local function counts()
	local counter = redis.pcall('GET', TOKEN)
	local n = tonumber(counter)
	return not counter or n and n >= FLOOR and n < SPAN and digits(n) == counter
		and redis.call('PTTL', TOKEN) >= 0
end

-- foreign returns which key holds foreign data, if one does. A set of ours has leases.
-- The token is looked at where the kind is "w".
local function foreign(kind)
	if held ~= 'none' and not mine and (held ~= 'string' and held ~= 'set'
		or redis.call('PTTL', HOLDER) == -1 or held == 'set' and redis.call('EXISTS', LEASES) == 0) then
		return HOLDER
	elseif not sorted(INTENTS) then
		return INTENTS
	elseif not sorted(LEASES) then
		return LEASES
	elseif kind == 'w' and not counts() then
		return TOKEN
	end
end

-- refuse is the reply where a key holds foreign data.
local function refuse(key)
	return reply(FOREIGN, redis.call('TYPE', key).ok .. ':' .. key)
end

local function lives(ends)
	return ends and tonumber(ends) > now
end

-- seeded is n, the counter's value, unless the counter has just been made: then
-- it starts at the server's clock. With a proposal it is raised to that.
local function seeded(n, proposal)
	if n == 1 then
		n = math.max(us, FLOOR)
	elseif not proposal then
		return n
	end
	n = math.max(n, proposal or 0)
	redis.call('SET', TOKEN, digits(n), 'PX', RETENTION)
	return n
end

-- next_token is the token of a new writer, who stands at s in the intents.
local function next_token(s)
	local n = redis.call('INCR', TOKEN)
	if not score and n > 1 and n < us then
		n = redis.call('INCRBY', TOKEN, digits(us - n))
	end
	return seeded(n, score and s % SPAN)
end

-- tell notes that id has been granted, for its mailbox: "<token> <n> <n> …".
local function tell(id, n)
	local mailbox, number = string.match(id, '^(.*):(%d+)$')
	if mailbox then
		news = news or {}
		news[mailbox] = news[mailbox] or {digits(n)}
		table.insert(news[mailbox], number)
	end
end

-- expire lets every key live as long as the longest lease, and no longer.
local function expire()
	local last = redis.call('ZRANGE', LEASES, '-1', '-1', 'WITHSCORES')[2]
	if last then
		redis.call('PEXPIREAT', LEASES, last)
		redis.call('PEXPIREAT', INTENTS, last)
		if held == 'set' then
			redis.call('PEXPIREAT', HOLDER, last)
		end
	end
	shorter = false
end

-- drop takes out whoever's lease has ended. It never touches a writer: that
-- lease is the holder key's own TTL.
local function drop()
	local ended = redis.call('ZRANGEBYSCORE', LEASES, '-inf', digits(now), 'LIMIT', '0', digits(BATCH))
	if #ended == 0 then
		return
	end
	redis.call('ZREM', LEASES, unpack(ended))
	if held == 'set' then
		redis.call('SREM', HOLDER, unpack(ended))
		held = redis.call('TYPE', HOLDER).ok
	end
	local intents = {}
	for i, id in ipairs(ended) do
		intents[2 * i - 1], intents[2 * i] = 'w' .. id, 'r' .. id
	end
	redis.call('ZREM', INTENTS, unpack(intents))
	if #ended == BATCH then
		more = 1
	end
end

-- admit_writer makes a waiter, taken out of the intents, the writer, with the
-- lease that it has already. From here on the holder's TTL is that lease: an
-- entry left in the leases would one day end a writer that lives.
local function admit_writer(id, s)
	local ends = redis.call('ZSCORE', LEASES, id)
	if not ends then
		return
	end
	shorter = shorter or tonumber(ends) > now + redis.call('PTTL', LEASES) - 2
	redis.call('ZREM', LEASES, id)
	if lives(ends) then
		local n = next_token(s)
		redis.call('SET', HOLDER, id, 'PXAT', ends)
		held = 'string'
		tell(id, n)
	end
end

-- admit_readers makes waiters, taken out of the intents, readers.
local function admit_readers(ids)
	if #ids == 0 then
		return
	end
	local living = {}
	for i, ends in ipairs(redis.call('ZMSCORE', LEASES, unpack(ids))) do
		if lives(ends) then
			living[#living + 1] = ids[i]
			tell(ids[i], 0)
		end
	end
	if #living > 0 then
		redis.call('SADD', HOLDER, unpack(living))
		if held == 'none' then
			held, shorter = 'set', true
		end
	end
end

-- readers_in_front takes the run of readers at the head of the intents out of them, a
-- batch of it.
local function readers_in_front()
	local ids = {}
	local run = redis.call('ZRANGE', INTENTS, '0', digits(BATCH - 1))
	while run[#ids + 1] and string.sub(run[#ids + 1], 1, 1) == 'r' do
		ids[#ids + 1] = string.sub(run[#ids + 1], 2)
	end
	if #ids > 0 then
		redis.call('ZREMRANGEBYRANK', INTENTS, '0', digits(#ids - 1))
	end
	if #ids == BATCH then
		more = 1
	end
	return ids
end

-- settle hands on what is free: while the head of the intents fits the holders
-- it joins them, or goes, if its lease has ended. Whoever else's has ended goes
-- first: a reader may be all that stands in the way, or a writer that waits in a
-- run of readers. The messages go out last: nothing of a script is taken back when
-- a command of it fails. Nobody is granted past a writer whose token cannot be given.
-- Of the intents and the leases it expects that they are ours.
local function settle()
	if held == 'set' or held == 'none' then
		drop()
	end
	if held == 'set' and more == 0 then
		admit_readers(readers_in_front())
	end
	while more == 0 and held == 'none' do
		local head = redis.call('ZRANGE', INTENTS, '0', '0', 'WITHSCORES')
		if not head[1] then
			break
		elseif string.sub(head[1], 1, 1) ~= 'w' then
			admit_readers(readers_in_front())
		elseif counts() then
			redis.call('ZREM', INTENTS, head[1])
			admit_writer(string.sub(head[1], 2), head[2])
		else
			blocked = true
			break
		end
	end
	if shorter then
		expire()
	end
	for mailbox, words in pairs(news or {}) do
		local message = table.concat(words, ' ')
		if mailbox == own then
			carried = message
		elseif type(redis.pcall('PUBLISH', mailbox, message)) == 'table' then
			untold = 2
		end
	end
end
