-- revoke.lua: end an acquisition by its id, as its owner's release would, and tell the owner.
--
-- KEYS  1 holder, 2 intents, 3 leases, 4 token: see lib/keys.lua
-- ARGV  1 id, "<mailbox>:<n>"
--       2 how long, in ms, a tombstone refuses an acquire of the id, and tells its owner why
--       3 (quorum only) "0": the ids that the acquisition has on this node are meant, whatever
--         they are on others: the name of the mailbox but for its last number, and n but for
--         its last three digits, are the same
-- Reply as in lib/status.lua:
--       released    it held or waited; its mailbox has been sent "revoked <n>"
--       tombstoned  it neither holds nor waits, and has a tombstone: it may have been this call,
--                   sent twice
--       gone        it neither holds nor waits
--       foreign     a key holds foreign data; nothing has changed. Also if all has been done, but
--                   a waiter cannot be given its token
--       It works on a full Redis.

-- include lib/keys.lua
local ID, TOMBSTONE = ARGV[1], ARGV[2]
local score = ARGV[3] and tonumber(ARGV[3])

-- include lib/clock.lua
-- include lib/token.lua
-- include lib/held.lua
-- include lib/expiry.lua
-- include lib/status.lua
-- include lib/message.lua
-- include lib/reply.lua
-- include lib/foreign.lua
-- include lib/hand_on.lua

local bad_key = foreign_key()
if bad_key then
	return foreign(bad_key)
end
call('ZREM', LEASES, '') -- changes nothing, and a full Redis does not refuse it

-- The ids of an acquisition: what they have in common.
local OF_ONE = '^(.*)%.%d+:(%d*)%d%d%d$'
local process, acquisition = string.match(score and ID or '', OF_ONE)

local function belongs(candidate)
	local its_process, its_acquisition = string.match(candidate, OF_ONE)
	return candidate == ID or process and its_process == process and its_acquisition == acquisition
end

-- Those that hold or wait.
local revoked, writer = {}, held == 'string' and call('GET', HOLDER)
if writer and belongs(writer) then
	revoked[1] = writer
end
if not process and lives(call('ZSCORE', LEASES, ID)) then
	revoked[#revoked + 1] = ID
end
local cursor = process and '0'
while cursor do
	local page = call('ZSCAN', LEASES, cursor, 'MATCH', process .. '.*:' .. acquisition .. '???', 'COUNT', '1000')
	for i = 1, #page[2], 2 do
		if belongs(page[2][i]) and lives(page[2][i + 1]) then
			revoked[#revoked + 1] = page[2][i]
		end
	end
	cursor = page[1] ~= '0' and page[1]
end

-- They go from wherever they are, and tombstones come in their place.
for i, id in ipairs(revoked) do
	if id == writer then
		call('DEL', HOLDER)
		held = 'none'
	end
	call('ZREM', LEASES, id)
	call('ZREM', INTENTS, 'w' .. id, 'r' .. id)
	if held == 'set' and call('SREM', HOLDER, id) == 1 then
		held = call('TYPE', HOLDER).ok
	end
	call('ZADD', LEASES, format('%d', now + TOMBSTONE), '-' .. id)
	must_expire = true
end
drop()
hand_on()
for i, id in ipairs(revoked) do
	local mailbox, number = string.match(id, ADDRESS)
	if mailbox then
		send(mailbox, 'revoked ' .. number)
	end
end
if blocked then
	return foreign(TOKEN)
elseif revoked[1] then
	return reply(RELEASED)
end
return reply(lives(call('ZSCORE', LEASES, '-' .. ID)) and TOMBSTONED or GONE)
