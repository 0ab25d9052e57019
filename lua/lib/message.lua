-- lib/message.lua: waiters learn of their grant by one message to each mailbox:
-- "<token> <n> <n> …", where <n> is the number in an id, and the token is 0 for readers.

-- The mailbox of a caller that releases. Its message travels in the reply.
local own

-- address splits an id into its mailbox and its number.
local function address(id)
	return string.match(id, '^(.*):(%d+)$')
end

local function send(mailbox, text)
	if mailbox == own then
		message = text
	elseif type(redis.pcall('PUBLISH', mailbox, text)) == 'table' then
		untold = 2
	end
end
