-- rlock.lua: "I want to be a reader".
--
-- KEYS  1 holder, 2 intents, 3 leases, 4 token
-- ARGV  1 id, 2 ttl in ms, 3 how, 4 (only of a quorum) score: as in lock.lua
-- Reply as of prelude.lua: granted, waiting, busy, buried or foreign;
--       gone for an id that has waited and whose lease has ended.

local kind, mine, score = 'r', false, tonumber(ARGV[4])

-- include queue.lua
-- include prelude.lua
-- include standing.lua
-- include enter.lua

return enter(kind, ARGV[1], ARGV[2], ARGV[3])
