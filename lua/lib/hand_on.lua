-- lib/hand_on.lua: whatever frees the lock hands it on in the same script.
--
-- A full Redis (maxmemory, noeviction) refuses a command that may grow memory, unless the
-- script has written before. So a renewal and a release begin with a write that cannot grow
-- memory, and work; an acquire begins with one that may, so that it is refused before it has
-- changed anything.

-- How many participants one step moves at most. A script takes a few steps, so this bounds
-- the time that the server is busy with it.
local BATCH = 250

-- Whether the TTLs of the keys must be set: the end of the longest lease may have changed, or
-- a key is new.
local must_expire = false

-- Whether a writer would be granted, but the token is foreign data.
local blocked = false

-- The words of the messages to send when all is in order, by mailbox.
local messages = {}

local function lives(ends)
	return ends and tonumber(ends) > now
end

local function tell(id, token)
	local mailbox, number = string.match(id, ADDRESS)
	if mailbox then
		messages[mailbox] = messages[mailbox] or {format('%d', token)}
		table.insert(messages[mailbox], number)
	end
end

-- drop takes out the participants whose lease has ended. It never touches a writer, whose
-- lease is the holder key's own TTL.
local function drop()
	local ended = call('ZRANGEBYSCORE', LEASES, '-inf', format('%d', now), 'LIMIT', '0', format('%d', BATCH))
	if #ended == 0 then
		return
	end
	call('ZREM', LEASES, unpack(ended))
	if held == 'set' then
		call('SREM', HOLDER, unpack(ended))
		held = call('TYPE', HOLDER).ok
	end
	local intents = {}
	for i, id in ipairs(ended) do
		intents[2 * i - 1], intents[2 * i] = 'w' .. id, 'r' .. id
	end
	call('ZREM', INTENTS, unpack(intents))
	if #ended == BATCH then
		more = MORE
	end
end

-- admit_writer makes the writer at the head of the intents the holder, with the lease that it
-- has; if that has ended, it goes. From here on the holder key's TTL is that lease: an entry
-- left in the leases would one day end a writer that lives. If the token is foreign data,
-- nothing changes.
local function admit_writer(member, score_of_member)
	if not last_token then
		blocked = true
		return
	end
	local id = string.sub(member, 2)
	local ends = call('ZSCORE', LEASES, id)
	call('ZREM', INTENTS, member)
	if not ends then
		return
	end
	must_expire = must_expire or tonumber(ends) > now + call('PTTL', LEASES) - 2
	call('ZREM', LEASES, id)
	if lives(ends) then
		local token = next_token(score and score_of_member % SPAN)
		call('SET', HOLDER, id, 'PXAT', ends)
		held = 'string'
		tell(id, token)
	end
end

-- admit_readers makes the run of readers at the head of the intents holders, a batch of it.
local function admit_readers()
	local ids = {}
	local run = call('ZRANGE', INTENTS, '0', format('%d', BATCH - 1))
	while run[#ids + 1] and string.sub(run[#ids + 1], 1, 1) == 'r' do
		ids[#ids + 1] = string.sub(run[#ids + 1], 2)
	end
	if #ids == 0 then
		return
	elseif #ids == BATCH then
		more = MORE
	end
	call('ZREMRANGEBYRANK', INTENTS, '0', format('%d', #ids - 1))
	local living = {}
	for i, ends in ipairs(call('ZMSCORE', LEASES, unpack(ids))) do
		if lives(ends) then
			living[#living + 1] = ids[i]
			tell(ids[i], 0)
		end
	end
	if #living > 0 then
		call('SADD', HOLDER, unpack(living))
		if held == 'none' then
			held, must_expire = 'set', true
		end
	end
end

-- hand_on grants to the head of the intents while it fits the holders. Ended leases go first:
-- a reader may be all that stands in the way, or a writer that waits in a run of readers.
-- Nobody is granted past a writer whose token cannot be given. The messages go out last:
-- nothing of a script is undone if a command of it fails. The intents and the leases have to
-- be ours.
local function hand_on()
	if held == 'set' or held == 'none' then
		drop()
	end
	if held == 'set' and more == 0 then
		admit_readers()
	end
	while more == 0 and held == 'none' and not blocked do
		local first = call('ZRANGE', INTENTS, '0', '0', 'WITHSCORES')
		if not first[1] or not is_waiter(first[1]) then
			break -- a foreign member would be the head for ever
		elseif string.sub(first[1], 1, 1) == 'w' then
			admit_writer(first[1], first[2])
		else
			admit_readers()
		end
	end
	if must_expire then
		expire(held == 'set', true)
	end
	for mailbox, words in pairs(messages) do
		send(mailbox, table.concat(words, ' '))
	end
end
