-- A server says hello. args: server, incarnation. Returns how many tickets an earlier process of that name had held:
-- they are issued again.
local tickets = 0
if redis.call('HGET', key('incarnations'), args.server) ~= args.incarnation then
  tickets = take_back(args.server, 'server ' .. args.server .. ' restarted')
end
redis.call('HSET', key('incarnations'), args.server, args.incarnation)
redis.call('ZADD', key('heard'), now(), args.server)
return tickets
