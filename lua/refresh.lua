-- refresh.lua: renew the lease of a holder or a waiter. It puts no id into the queue.
--
-- KEYS  1 holder, 2 intents, 3 leases, 4 token: see lib/keys.lua. A writer that holds may
--       pass the holder alone: while it holds there is nothing to hand on, and a slot that is
--       migrating answers TRYAGAIN to several keys of which some do not exist.
-- ARGV  1 id, "<mailbox>:<n>"
--       2 TTL of the lease from now on, in ms
--       3 (only with all keys) kind: "w" or "r"; a writer that passes "r" becomes a reader,
--         and no other writer comes in between
--       4 (quorum only) score: as in lock.lua
--       5 (quorum only) a fencing token to which that of the writer in place is raised
-- Reply with the holder alone: 1 if the id is the writer, 0 if it is not.
--       Else as in lib/status.lua:
--       granted  the id holds: a writer's fencing token, 0 for a reader
--       waiting  the id is in the queue
--       gone     the id neither holds nor waits, or its lease has ended
--       tombstoned  as gone, and the id has a tombstone: it was revoked
--       foreign  a key holds foreign data; nothing has changed
--       It works on a full Redis.

if #KEYS == 1 then
	return redis.pcall('GET', KEYS[1]) == ARGV[1] and redis.call('PEXPIRE', KEYS[1], ARGV[2]) or 0
end

-- include lib/keys.lua
local ID, TTL, KIND = ARGV[1], ARGV[2], ARGV[3]
local score = ARGV[4] and tonumber(ARGV[4])

-- include fast/refresh.lua

-- include lib/clock.lua
-- include lib/token.lua
-- include lib/held.lua
-- include lib/expiry.lua
-- include lib/status.lua
-- include lib/message.lua
-- include lib/reply.lua
-- include lib/in_front.lua
-- include lib/foreign.lua
-- include lib/hand_on.lua
-- include lib/standing.lua

local bad_key = foreign_key(KIND)
if bad_key then
	return foreign(bad_key)
end
call('ZREM', LEASES, '') -- changes nothing, and a full Redis does not refuse it

-- The caller's lease is extended if it is alive.
local writer, new_end = is_writer(), format('%d', now + TTL)
if writer and KIND == 'r' then
	-- No other writer comes in between, and the readers in front join when it hands on.
	call('ZADD', LEASES, new_end, ID)
	call('DEL', HOLDER)
	call('SADD', HOLDER, ID)
	held, must_expire = 'set', true
elseif writer then
	call('PEXPIRE', HOLDER, TTL)
elseif lives(call('ZSCORE', LEASES, ID)) then
	call('ZADD', LEASES, new_end, ID)
	must_expire = true
end

-- Whatever the answer, what is free is handed on first: the caller may be the next.
drop()
hand_on()
return standing(tonumber(ARGV[5]))
