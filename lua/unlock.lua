-- unlock.lua: release the lock, or leave the queue.
--
-- KEYS  1 holder, 2 intents, 3 leases, 4 token: see lib/keys.lua
-- ARGV  1 id, "<mailbox>:<n>"
--       2 kind: "w" or "r"
--       3 (optional) how long, in ms, a tombstone refuses an acquire of this id: given if one
--         may still be under way; "" if not
--       4 (quorum only) score: as in lock.lua
-- Reply as in lib/status.lua:
--       released  the id held or waited; with the message for the caller's mailbox
--       gone      the id neither held nor waited, or its lease had ended
--       foreign   a key that it has to touch holds foreign data. What is certainly the
--                 caller's own has been released: its holder key, and its entries in those
--                 keys that are ours; a tombstone is there if the leases are ours; nothing has
--                 been handed on. Also if all has been released, but a waiter cannot be given
--                 its token.
--       It works on a full Redis.

-- include lib/keys.lua
local ID, KIND = ARGV[1], ARGV[2]
local score = ARGV[4] and tonumber(ARGV[4])
local tombstone = ARGV[3] ~= '' and ARGV[3]
local writer = KIND == 'w' and redis.pcall('GET', HOLDER) == ID

-- include fast/unlock.lua

-- include lib/clock.lua
-- include lib/token.lua
-- include lib/held.lua
-- include lib/expiry.lua
-- include lib/status.lua
-- include lib/message.lua
-- include lib/reply.lua
-- include lib/foreign.lua
-- include lib/hand_on.lua

local outcome = GONE
if writer then
	call('DEL', HOLDER)
	held, outcome = 'none', RELEASED
end

-- The id goes from wherever it is, and a tombstone comes in its place.
local bad_key = foreign_key()
local sane_intents, sane_leases = not bad_key or sorted(INTENTS), not bad_key or sorted(LEASES)
if sane_leases and not writer then
	if lives(call('ZSCORE', LEASES, ID)) then
		outcome = RELEASED
	end
	must_expire = call('ZREM', LEASES, ID) == 1
end
if sane_intents and not writer then
	call('ZREM', INTENTS, KIND .. ID)
end
if held == 'set' and call('SREM', HOLDER, ID) == 1 then
	held = call('TYPE', HOLDER).ok
end
if tombstone and sane_leases then
	call('ZADD', LEASES, format('%d', now + tombstone), '-' .. ID)
	must_expire = true
end

-- Then the lock is handed on, unless foreign data is in the way.
if bad_key then
	local longest = sane_leases and call('ZRANGE', LEASES, '-1', '-1', 'WITHSCORES')[2]
	if longest then
		call('PEXPIREAT', LEASES, longest)
	end
	return foreign(bad_key)
end
if tombstone then
	drop() -- of tombstones too, which hand_on does not do while a writer holds
end
own = string.match(ID, ADDRESS)
hand_on()
if blocked then
	return foreign(TOKEN)
end
return reply(outcome)
