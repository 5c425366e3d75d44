-- Keeps events of episodes of tickets in flight, until their group is settled; those of a lost server go to the next ticket
-- of the task (issue.lua). args: events (of {id, server, env, place (<episode>:<place>), tokens}), most_bytes (of a ticket).
-- ARGV[2] and later: their bytes. Repeating it has no effect.
-- Returns for each 'kept', 'void' (the ticket is not this server's any more) or 'full' (the ticket has too many bytes).
--   events:<id>: bytes by place; about:<id>: event_tokens, event_bytes, env
local outcomes = {}
for i, event in ipairs(args.events) do
  local id, content = event.id, ARGV[i + 1]
  local known = redis.call('HMGET', key('about:' .. id), 'state', 'server', 'event_bytes')
  if known[1] ~= 'issued' or known[2] ~= event.server then
    outcomes[i] = 'void'
  elseif tonumber(known[3] or 0) + #content > args.most_bytes then
    outcomes[i] = 'full'
  else
    if redis.call('HSETNX', key('events:' .. id), event.place, content) == 1 then
      redis.call('HINCRBY', key('about:' .. id), 'event_tokens', event.tokens)
      redis.call('HINCRBY', key('about:' .. id), 'event_bytes', #content)
      redis.call('HSET', key('about:' .. id), 'env', event.env)
    end
    outcomes[i] = 'kept'
  end
end
return outcomes
