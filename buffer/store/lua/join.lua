-- Registers a server. args: server, incarnation. Returns the number of tickets held by an earlier process of that name;
-- their tasks are issued again. A process that was silent for so long that it was removed goes on with its tickets.
local tickets, unsettled = 0, key('unsettled:' .. args.server)
if redis.call('HGET', key('incarnations'), args.server) ~= args.incarnation then
  tickets = reissue_all(args.server, 'server ' .. args.server .. ' restarted', 'server_lost')
  if redis.call('HGET', unsettled, '@') ~= '@' .. args.incarnation then redis.call('DEL', unsettled) end
  redis.call('HSET', unsettled, '@', '@' .. args.incarnation)
  redis.call('PERSIST', unsettled)
end
redis.call('HSET', key('incarnations'), args.server, args.incarnation)
redis.call('ZADD', key('heard'), now(), args.server)
return tickets
