-- lib/keys.lua: the keys of a lock. All are in one slot, and each has a TTL.
--
--   HOLDER   string = the writer's id, its TTL the writer's lease;
--            or set = the readers' ids
--   INTENTS  sorted set of kind .. id by score: the waiters, in order
--   LEASES   sorted set of id by end of lease, in ms of the server's clock: readers and
--            waiters; "-" .. id is a tombstone: that id may not acquire any more
--   TOKEN    string = the last fencing token
--
-- Every number goes to a command as a string, by format('%d', n): the operator .. loses
-- digits from 1e14 up, and a number that Redis prints itself takes longer than most
-- commands do.
local HOLDER, INTENTS, LEASES, TOKEN = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local call, format = redis.call, string.format
