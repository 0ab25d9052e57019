-- both.lua: the calls of two verbs in one script: an acquire, and behind it a release or a
-- downgrade. Nobody else is granted the lock in between.
--
-- KEYS  1 holder, 2 intents, 3 leases, 4 token: see lib/keys.lua
-- ARGV  1 how many arguments the acquire has; then those, and those of the other verb
-- Reply {the reply to the acquire, the reply to the other}, each as its verb has it. If the
--       acquire fails, as on a full Redis, its reply is {error}, with the error as a string,
--       and the other verb is called all the same. If that fails, the script fails, although
--       the acquire has been made. Each hands on to as many as a script of its own would.

local function acquire(KEYS, ARGV)
-- first verb
end

local function other(KEYS, ARGV)
-- second verb
end

local last = ARGV[1] + 1
local done, answer = pcall(acquire, KEYS, {unpack(ARGV, 2, last)})
if not done then
	answer = {type(answer) == 'table' and answer.err or answer} -- before Redis 7.0 it is a string
end
return {answer, other(KEYS, {unpack(ARGV, last + 1)})}
