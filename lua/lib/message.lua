-- lib/message.lua: waiters learn of their grant by one message to each mailbox:
-- "<token> <n> <n> …", where <n> is the number in an id, and the token is 0 for readers.

-- The mailbox and the number in an id.
local ADDRESS = '^(.*):(%d+)$'

-- The mailbox of a caller that releases, and the message for it, which travels in the reply.
local own, message

-- 0, or UNPUBLISHED.
local unpublished = 0

local function send(mailbox, text)
	if mailbox == own then
		message = text
	elseif type(redis.pcall('PUBLISH', mailbox, text)) == 'table' then
		unpublished = UNPUBLISHED
	end
end
