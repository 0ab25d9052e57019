-- fast/unlock.lua: a writer unlocks, and nobody waits. Then come the values that unlock_reader
-- and hand_over share. A release with a tombstone takes none of these paths.

-- include lib/keys.lua
local ttl_of_intents = writer and not tombstone and call('PTTL', INTENTS)
if ttl_of_intents == -2 then
	return call('DEL', HOLDER) -- 1: released
end

-- How many readers hold, if the caller may be one of them.
local holding_readers = KIND == 'r' and not tombstone and not score and redis.pcall('SCARD', HOLDER)
holding_readers = type(holding_readers) == 'number' and holding_readers > 0 and call('PTTL', HOLDER) >= 0 and holding_readers

-- The clock is read before the TTLs: before Redis 7.2 it moves within a script, and with a TTL
-- added to it must not come out later than the lease ends.
-- include lib/clock.lua

-- The first waiter and its score, if it is a writer.
local ttl_of_leases, head = -2, nil
if holding_readers or ttl_of_intents then
	ttl_of_intents = ttl_of_intents or call('PTTL', INTENTS)
	ttl_of_leases = call('PTTL', LEASES)
	head = ttl_of_intents >= 0 and ttl_of_leases >= 0 and redis.pcall('ZRANGE', INTENTS, '0', '0', 'WITHSCORES')
end
local writer_waits = head and head[1] and string.sub(head[1], 1, 1) == 'w'

-- include lib/expiry.lua
-- include lib/status.lua
-- include fast/unlock_reader.lua
-- include fast/hand_over.lua
