-- Registers a server. args: server, incarnation. Returns the number of tickets held by an earlier process of that name;
-- their tasks are issued again.
local tickets = 0
if redis.call('HGET', key('incarnations'), args.server) ~= args.incarnation then
  tickets = reissue_all(args.server, 'server ' .. args.server .. ' restarted')
end
redis.call('HSET', key('incarnations'), args.server, args.incarnation)
redis.call('ZADD', key('heard'), now(), args.server)
return tickets
